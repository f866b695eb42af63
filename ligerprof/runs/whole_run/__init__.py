"""Simulate a whole run over sequences of given lengths, step after step, through one allocator."""
