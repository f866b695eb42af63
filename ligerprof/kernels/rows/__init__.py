"""What the kernels that reduce row by row share."""
