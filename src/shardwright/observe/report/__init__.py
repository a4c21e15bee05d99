"""One HTML file for a run or a plan, or for two of them: gathered, drawn, written.

::

    run folder or plan file ─► gathered/ ─► ReportData ─► drawn/ ─► pages/ ─► report.html
                                               │
                                               └─► to_dict, for programs
"""

from shardwright.observe.report.gathered.compared import Compared
from shardwright.observe.report.gathered.data import Predicted, ReportData, gather
from shardwright.observe.report.pages.page import render_page
from shardwright.observe.report.write import check_plotly, write_report

__all__ = [
    "Compared",
    "Predicted",
    "ReportData",
    "check_plotly",
    "gather",
    "render_page",
    "write_report",
]
