"""Load the pickle of a snapshot safely, and fast where its events are laid out alike."""
