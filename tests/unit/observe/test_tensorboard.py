"""The adapter, with a stand-in for the package and, where it is installed, with the package itself."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwright.errors import ConfigError
from shardwright.observe import tensorboard
from shardwright.observe.tensorboard import TensorBoardWriter, check_tensorboard


def test_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    for attempt in (check_tensorboard, lambda: TensorBoardWriter(tmp_path)):
        with pytest.raises(ConfigError, match=r"pip install 'shardwright\[tensorboard\]'"):
            attempt()


class FakeWriter:
    calls: list[tuple[Any, ...]]

    def __init__(self, folder: str) -> None:
        type(self).calls = [("open", folder)]

    def add_scalar(self, tag: str, data: float, step: int) -> None:
        self.calls.append((tag, data, step))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def close(self) -> None:
        self.calls.append(("close",))


def test_writes_single_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, summary = ModuleType("tensorboard"), ModuleType("tensorboard.summary")
    package.__spec__ = ModuleSpec("tensorboard", None)
    summary.Writer = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    writer = TensorBoardWriter(tmp_path)
    writer.write({"train/loss": 2.5, "memory/peak_by_rank(GiB)": [1.0, 2.0]}, step=7)
    writer.close()
    assert FakeWriter.calls == [
        ("open", str(tmp_path)),
        ("train/loss", 2.5, 7),
        ("flush",),
        ("close",),
    ]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_package_itself(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write({"train/loss": 2.5}, step=7)
    writer.close()
    [file] = tmp_path.iterdir()
    assert b"train/loss" in file.read_bytes()
