"""Analyze a torch.profiler trace: GPU busy time, kernels by class, and the causes of idle time."""
