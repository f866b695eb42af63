"""The study's report: Markdown with tables and figures, every figure in it from result files."""

from ligerprof.reports.study.document import write_report

__all__ = ["write_report"]
