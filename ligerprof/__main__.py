"""`python -m ligerprof` is `ligerprof`."""

from ligerprof.cli.main import main

main(prog_name="ligerprof")
