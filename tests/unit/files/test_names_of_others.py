"""Names from files, folders and models reach consoles, pages and manifests escaped."""

import io
import json
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from observe.run_folders import run_folder
from planned import planned

from shardwright.errors import ConfigError, PlanError
from shardwright.launch import Estimator, Kubernetes, Slurm
from shardwright.observe import Console
from shardwright.observe.report import gather
from shardwright.observe.report.page import render_page
from shardwright.text import control_in, printable

from .good_files import READERS

# Clears the screen, sets the title, rings, goes back, makes a line that looks like ours, turns what follows.
EVIL = "a\x1b[2J\x1b]0;title\x07\r\nPlanError: \x9b2J\u202eb\u2028\u200b"


def is_harmless(text: str) -> bool:
    return all(each == "\n" or unicodedata.category(each) not in ("Cc", "Cf", "Zl", "Zp") for each in text)


@given(st.text())
def test_what_is_printable_is_harmless_and_stays_json(text):
    shown = printable(text)
    assert is_harmless(shown)
    assert "\n" not in shown
    assert printable(shown) == shown
    surrogates = any("\ud800" <= each <= "\udfff" for each in text)
    if "\\" not in text and '"' not in text and not surrogates:
        assert json.loads(f'"{shown}"') == text
    assert control_in(shown) is None


@pytest.mark.parametrize("name", ["a\x1b", "a\nb", "a\rb", "a\x9b", "a\u202e", "a\u2066", "a\u2028", "a\x7f"])
def test_controls_are_found_in_names(name):
    assert control_in(name) is not None


@pytest.mark.parametrize("name", ["first-try", "erster Versuch", "模型", "👩\u200d🔬", "naïve"])
def test_names_of_people_are_names(name):
    assert control_in(name) is None


def test_errors_are_escaped_whoever_prints_them():
    assert str(ConfigError(f"model {EVIL} is none")).splitlines()[0] == (
        "model a\\u001b[2J\\u001b]0;title\\u0007\\u000d"
    )
    assert is_harmless(str(PlanError(EVIL)))


def test_the_console_escapes_and_keeps_its_own_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    console = Console(stream=stream, environ={"TERM": "xterm"})
    console.line("one\ntwo \x1b[2J")
    console.status("three \x1b[2J")
    assert stream.getvalue() == "one\ntwo \\u001b[2J\n\x1b[2mthree \\u001b[2J\x1b[0m\n"


def test_a_report_shows_names_and_obeys_none(tmp_path):
    name = "<script>alert(1)</script>" + EVIL.replace("/", "")
    folder = run_folder(tmp_path / name.replace("/", "|"), planned())
    page = render_page(gather(folder), library="")
    assert is_harmless(page)
    assert "<script>alert" not in page


@pytest.mark.parametrize("reader", [r for r in READERS if r.name in ("plan.json", "cluster.yaml")], ids=str)
@pytest.mark.parametrize("control", ["\\u001b", "\\u202e", "\\n", "\\u009b"])
def test_names_with_controls_are_refused_in_files(reader, control, tmp_path):
    reader.write(tmp_path)
    path = reader.path(tmp_path)
    text = path.read_text()
    was, new = (
        ('"f00d"', f'"f00d{control}"') if reader.name == "plan.json" else ("p4d.24xlarge\n", f'"{control}"\n')
    )
    assert was in text
    path.write_text(text.replace(was, new))
    with pytest.raises((PlanError, ConfigError), match="it must not have control characters"):
        reader.read(tmp_path)


def test_manifests_have_them_quoted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    value = EVIL.replace("\n", " ").replace("\r", " ")
    engine = Kubernetes(image="image")
    estimator = Estimator("train.py", engine=engine, instance_count=1, processes_per_host=1)
    estimator.set_hyperparameters(text=value)
    manifest = estimator.manifest(job_name="job")
    assert is_harmless(manifest)
    assert value in str(list(yaml.safe_load_all(manifest))) or value.isprintable() is False
    estimator = Estimator("train.py", engine=Slurm(), processes_per_host=1, hyperparameters={"text": value})
    estimator.fit(job_name="job", dry_run=True)
    assert is_harmless(capsys.readouterr().out)
