"""Record the memory of users' own training loops."""
