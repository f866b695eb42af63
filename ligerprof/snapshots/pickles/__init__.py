"""Load the pickle of a snapshot safely and fast; `load.load_snapshot_data` is the only entry point."""
