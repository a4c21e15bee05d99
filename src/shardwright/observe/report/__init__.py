"""One HTML file for a run or a plan: gathered, drawn, written.

::

    run folder or plan file ─► gather ─► ReportData ─► render_page ─► report.html
                                            └─► to_dict, for programs
"""

from shardwright.observe.report.compared import Compared
from shardwright.observe.report.data import Predicted, ReportData, gather
from shardwright.observe.report.page import render_page
from shardwright.observe.report.write import check_plotly, write_comparison, write_report

__all__ = [
    "Compared",
    "Predicted",
    "ReportData",
    "check_plotly",
    "gather",
    "render_page",
    "write_comparison",
    "write_report",
]
