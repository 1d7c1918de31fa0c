"""Console output, metrics of a step, alarms, and the report of a run."""

from hybrid_rl.report.card import write_card
from hybrid_rl.report.page import write_report

__all__ = ["write_card", "write_report"]
