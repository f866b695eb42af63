"""Offline HTML pages of runs and peaks."""
