"""Search for recipes that fit a memory limit."""
