"""The HTML page of a report: one file, with no network requests.

Text from files is escaped; the plots' data is in a JSON block without any ``<``. A content security policy
forbids the page to load anything, and to run scripts other than its own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from shardwright import __version__
from shardwright.observe.report.drawn.charts import charts
from shardwright.observe.report.drawn.colors import Figure
from shardwright.observe.report.gathered.data import ReportData
from shardwright.observe.report.html import escape
from shardwright.observe.report.pages.head import facts, head
from shardwright.observe.report.pages.sections import alternatives, memory, metrics, parts, reasons, timeline
from shardwright.observe.report.pages.stage_map import stage_map, stage_table

__all__ = ["page_of", "render_page"]


def render_page(data: ReportData, *, library: str) -> str:
    """The page of a run or plan."""
    plots = charts(data)
    sections = (
        head(data),
        timeline(data, plots),
        stage_map(data.plan),
        parts(data, plots),
        stage_table(data),
        memory(data, plots),
        alternatives(data.plan),
        reasons(data.plan),
        metrics(data, plots),
        facts(data),
    )
    return page_of(data.name, sections, plots, library=library)


def page_of(title: str, sections: Sequence[str], plots: Mapping[str, Figure], *, library: str) -> str:
    """A page of sections that are HTML."""
    figures = json.dumps(plots, allow_nan=False).replace("<", "\\u003c")
    nonce = hashlib.sha256(figures.encode()).hexdigest()[:32]
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(filter(None, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} - Shardwright</title>
<style>{_asset("page.css")}</style>
</head>
<body>
{body}
<p class="soft">Written by Shardwright {escape(__version__)}.</p>
<script type="application/json" id="figures">{figures}</script>
<script type="text/plain" id="nonce">{nonce}</script>
<script type="text/plain" id="library">{library}</script>
<script nonce="{nonce}">{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("shardwright.observe.report.pages").joinpath(name).read_text(encoding="utf-8")
