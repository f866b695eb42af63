"""Give every block of a recording its role, module, phase and layer."""
