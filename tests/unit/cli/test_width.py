"""On a terminal of 80 columns, no line of a result is wider than it."""

import io
import sys

import pytest
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call

TASK = ("llama3-8b", "p4d.24xlarge*2", "--batch", "512")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Runs a command as on a terminal; returns what stdout gets there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    run_folder(tmp_path / "a", planned(), recorded=True)
    run_folder(tmp_path / "b", planned(microbatches=8, ranks=4), steps=5, recorded=True)
    for name in ("a", "b"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)

    def run(*words):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            call(capsys, *words)
        return terminal.getvalue().splitlines()

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("catalogue",),
        ("cheapest", *TASK, "--tokens", "1e12"),
        ("cluster", "p4d.24xlarge*2+p5.48xlarge"),
        ("compare", "a", "b", "-o", "page.html"),
        ("doctor",),
        ("explain", "b"),
        ("plan", "diff", "a", "b"),
        ("plan", "show", "b"),
        ("runs",),
        ("schedule", "show", "zb_v", "-n", "4", "--microbatches", "16"),
        ("search", *TASK),
        ("show", "b"),
        ("simulate", "b", "--slow", "1=2"),
        ("trace", "cli.models:build"),
        ("watch", "a"),
        ("what-if", *TASK, "--network", "4"),
        ("why-not", *TASK, "tensor=8", "pipeline=2"),
    ],
    ids=" ".join,
)
def test_lines_fit(shown, words):
    lines = shown(*words)
    assert lines
    # A path stays whole, however long.
    assert [line for line in lines if len(line) > 80 and max(map(len, line.split())) < 60] == []
