"""One HTML file about a run, from what it logged."""

from silverspoon_kd.report.history import RESULTS_FILE, History, read_history
from silverspoon_kd.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "RESULTS_FILE", "History", "read_history", "write_report"]
