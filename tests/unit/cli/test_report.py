"""``shardwright report``."""

import webbrowser

import pytest
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "runs" / "first", planned())


def test_a_run_gets_its_report(capsys, run):
    pytest.importorskip("plotly")
    code, out, err = call(capsys, "report", run)
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    assert "<h1>first</h1>" in (run / "report.html").read_text()
    assert "report.html" in call(capsys, "show", run)[1]


def test_a_plan_gets_one_beside_it(capsys, run, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    code, out, err = call(capsys, "report", run / "plan.json", "--open")
    assert (code, out) == (0, f"{run / 'plan.html'}\n")
    assert opened == [(run / "plan.html").as_uri()]
    assert "no browser could be opened" in err
    call(capsys, "report", run / "plan.json", "-o", tmp_path / "other.html")
    assert (tmp_path / "other.html").exists()


def test_without_plotly_it_says_how_to_get_it(capsys, run, monkeypatch):
    from shardwright.observe.report import page

    page.packed_library.cache_clear()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    code, out, err = call(capsys, "report", run)
    assert (code, out) == (2, "")
    assert "Run: pip install 'shardwright[report]'" in err
    assert not (run / "report.html").exists()
