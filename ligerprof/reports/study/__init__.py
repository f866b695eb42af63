"""A study's report: Markdown with tables and figures, as the study's file outlines it."""
