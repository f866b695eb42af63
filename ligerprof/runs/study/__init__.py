"""Studies: grids of training steps with a report, each described by a TOML file."""
