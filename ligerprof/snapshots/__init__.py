"""torch's memory snapshot files: read, replay, write."""

# the snapshot in a run directory
SNAPSHOT_NAME = "snapshot.pickle"
