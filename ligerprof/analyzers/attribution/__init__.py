"""Attribution: the role, module, phase and layer of each block of a recording."""
