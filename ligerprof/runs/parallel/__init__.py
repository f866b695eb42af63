"""Training on several GPUs with torch's own engines, DDP and FSDP2; the same code runs on GPUs and simulated."""
