"""Figures from result files: what each shows, and the one look they share."""
