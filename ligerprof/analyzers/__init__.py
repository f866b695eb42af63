"""Data in, data out: estimate, attribution, comparison."""
