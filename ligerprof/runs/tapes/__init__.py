"""Tapes of models: traced from their own code on a simulated GPU."""
