"""The version of the package: what everything may import, also below `ligerprof/__init__.py`."""

__version__ = "0.1.0"
