"""Suggestions: changes that lower a recorded peak, each computed by replaying the recording with the change."""
