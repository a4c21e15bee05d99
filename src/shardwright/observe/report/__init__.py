"""One HTML file for a run or a plan, or for two of them: gathered, drawn, written.

::

    run folder or plan file ─► data.py ─► ReportData ─► charts.py ─► page.py ─► report.html
                                              │
                                              └─► to_dict, for programs
"""

from shardwright.observe.report.data import Predicted, ReportData, gather
from shardwright.observe.report.page import check_plotly, render_page, write_report
from shardwright.observe.report.parts import Compared

__all__ = [
    "Compared",
    "Predicted",
    "ReportData",
    "check_plotly",
    "gather",
    "render_page",
    "write_report",
]
