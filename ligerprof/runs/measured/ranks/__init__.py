"""Training on several GPUs: launch one process per rank, measure in each, merge the outcomes."""
