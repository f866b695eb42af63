"""Record the memory of someone's own training."""
