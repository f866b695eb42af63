"""The folder that `ligerprof run` puts on PYTHONPATH."""
