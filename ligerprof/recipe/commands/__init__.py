"""Training commands: what a command line, or a line of a shell script, sets."""
