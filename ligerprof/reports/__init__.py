"""Data to something a person reads."""
