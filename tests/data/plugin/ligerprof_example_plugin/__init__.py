"""An example of a ligerprof plug-in."""
