"""On a terminal of 80 columns, no line of a result or a message is wider than it."""

import sys

import pytest
from files.good_files import READERS
from observe.run_folders import run_folder
from planned import planned

from cli.calling import Terminal, call
from fits import too_wide
from shardwright.cli.commands import probe, profile

TASK = ("llama3-8b", "p4d.24xlarge*2", "--batch", "512")


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Runs a command as on a terminal; returns the lines of stdout and of stderr there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    run_folder(tmp_path / "a", planned())
    run_folder(tmp_path / "b", planned(microbatches=8, ranks=4), steps=5)
    for name in ("a", "b"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)
    for reader in READERS:
        if reader.name in ("cluster.yaml", "config.json", "prices.json", "profile.json"):
            reader.write(tmp_path)
    # Ranks that measure leave their files, which are there.
    for module in (probe, profile):
        monkeypatch.setattr(module, "run_for_files", lambda *_, **__: True)

    def run(*words):
        out, err = Terminal(), Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            call(capsys, *words)
        return out.getvalue(), err.getvalue()

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("catalogue",),
        ("search", *TASK, "--tokens", "1e12"),
        ("catalogue", "p4d.24xlarge*2+p5.48xlarge"),
        ("compare", "a", "b"),
        ("doctor",),
        ("explain", "b"),
        ("plan", "cli.models:build", "-n", "2", "-o", "plan.json"),
        ("show", "b"),
        ("probe",),
        ("profile", "cli.models:build"),
        ("report", "b"),
        ("runs",),
        ("schedule", "zb_v", "-n", "4", "--microbatches", "16"),
        ("search", *TASK),
        ("trace", "cli.models:build"),
    ],
    ids=" ".join,
)
def test_lines_fit(shown, words):
    out, err = shown(*words)
    assert out
    assert too_wide(out) == []
    assert too_wide(err) == []
