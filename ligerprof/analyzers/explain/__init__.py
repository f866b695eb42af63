"""Answer what the memory of a recording belongs to."""
