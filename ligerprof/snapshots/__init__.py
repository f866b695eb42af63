"""torch's memory snapshot file: read, replayed, simulated, written."""
