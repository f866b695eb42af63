"""What a torch.profiler trace says: how busy the GPU was, with what, and why it waited when it did."""
