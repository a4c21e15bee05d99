"""Models from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli import models
from shardwright.cli.asking.factory import build
from shardwright.errors import UsageError

FILE = Path(models.__file__)


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("models", None)


def test_a_factory_in_a_file_and_in_a_module():
    for where in (str(FILE), "cli.models"):
        sample = build(f"{where}:build", device="meta")
        assert sample.model.embed.weight.is_meta
        assert [arg.shape for arg in sample.args] == [(8, 6)]
        assert (sample.kwargs, sample.loss) == ({}, None)


def test_a_batch_by_name_and_a_loss():
    assert list(build("cli.models:build_by_name", device="meta").kwargs) == ["ids"]
    assert build("cli.models:build_with_loss", device="meta").loss is not None


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("model.py", "names no function. Write model.py:build"),
        (":build", "names no function"),
        ("gone.py:build", r"there is no file gone.py. Give its path from /"),
        ("gone.module:build", "there is no module gone, seen from"),
        ("cli.models:biuld", r"cli.models has no function biuld. It has build, build_by_name"),
        ("cli.models:not_callable", "has no function not_callable"),
        ("cli.models:build_model_only", r"returned \(Model\), but it must return \(model, batch\)"),
    ],
)
def test_what_is_no_factory_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        build(factory, device="meta")


def test_a_failure_of_the_factory_shows_its_lines_and_not_ours():
    with pytest.raises(UsageError) as raised:
        build(f"{FILE}:build_failing", device="meta")
    text = str(raised.value)
    assert "build_failing failed with KeyError: 'layers'" in text
    assert 'raise KeyError("layers")' in text
    assert "cli/asking/factory.py" not in text


def test_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("import shardwright\nx = 1 / 0\n")
    with pytest.raises(UsageError, match=r"importing .*broken.py failed with ZeroDivisionError") as raised:
        build(f"{tmp_path / 'broken.py'}:build", device="meta")
    assert "x = 1 / 0" in str(raised.value)
    (tmp_path / "lacking.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(UsageError, match="No module named 'a_package_that_is_not_there'"):
        build(f"{tmp_path / 'lacking.py'}:build", device="meta")


NO_TORCH = """
import sys
from shardwright.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    sys.exit(9 if "torch" in sys.modules else ended.code)
"""


@pytest.mark.parametrize(
    "words",
    [["plan", "nosuch.py:build", "-n", "2"], ["trace", "nosuch.py:build"], ["profile", "nosuch"]],
)
def test_a_file_that_is_not_there_is_told_before_torch_is_imported(words, tmp_path):
    command = [sys.executable, "-c", NO_TORCH, *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 2, found.stderr
    assert "there is no file nosuch.py" in found.stderr or "nosuch names no function" in found.stderr


def test_a_script_that_trains_when_it_is_imported_is_stopped_there(tmp_path):
    """It trained to its end, before anything was said of the function."""
    script = tmp_path / "trains_at_once.py"
    script.write_text("import shardwright.torch as sw\nsw.init()\nraise SystemExit('has trained')\n")
    with pytest.raises(
        UsageError, match=r"trains_at_once\.py calls sw\.init\(\) when it is imported, and only"
    ):
        build(f"{script}:build", device="meta")
