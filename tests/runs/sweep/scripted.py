"""A cell's command that runs the Python code in its first argument."""

import sys

if __name__ == "__main__":
    source = sys.argv.pop(1)
    exec(source)
