"""One HTML file for a run or a plan: gathered, drawn, written.

::

    run folder or plan file ─► gather ─► ReportData ─► render_page ─► report.html
                                            └─► to_dict, for programs
"""

from shardwright.observe.report.data import Compared, Predicted, ReportData, gather
from shardwright.observe.report.page import render_page
from shardwright.observe.report.write import check_plotly, write_report

__all__ = ["Compared", "Predicted", "ReportData", "check_plotly", "gather", "render_page", "write_report"]
