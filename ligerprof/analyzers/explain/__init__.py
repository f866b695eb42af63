"""Explain a recording: peak, out-of-memory, growth, what-if, timeline, and the difference of two peaks."""
