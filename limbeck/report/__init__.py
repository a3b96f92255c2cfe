"""Pages about runs and alignments: one HTML file each, without torch, without a network."""

from limbeck.report.run_page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
