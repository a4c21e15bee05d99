"""Ranks are forked where libraries may be imported before a script begins."""

import signal
import sys
import threading
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder

import pytest

from shardwright.launch import launching
from shardwright.launch.ranks import agent
from shardwright.launch.ranks.request import LaunchRequest


@pytest.mark.parametrize(
    ("words", "platform", "has_gpus", "expected"),
    [
        ({}, "linux", False, ["train.py"]),
        ({"target": "package.train", "is_module": True}, "linux", False, []),
        ({}, "darwin", False, []),
        ({}, "linux", True, []),
        ({"device": "cpu"}, "linux", False, []),
        ({"target": "shardwright.integrations", "is_module": True}, "linux", False, []),
    ],
)
def test_a_process_with_libraries_is_begun(tmp_path, monkeypatch, words, platform, has_gpus, expected):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("SHARDWRIGHT_RUN_DIR", "SHARDWRIGHT_DEVICE", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # what is set is taken back
    begun = []

    @contextmanager
    def standby(folder, script):
        begun.append(script)
        yield

    monkeypatch.setattr(launching, "standby", standby)
    monkeypatch.setattr(launching, "may_have_gpus", lambda: has_gpus)
    monkeypatch.setattr(agent, "run", lambda *_, **__: 7)
    monkeypatch.setattr(sys, "platform", platform)
    request = LaunchRequest(**{"target": "train.py", "run_folder": tmp_path, **words})
    assert launching.launch(request, report=print) == 7
    assert begun == expected


def test_a_ctrl_c_while_pytorch_is_imported_ends_the_launcher(tmp_path, monkeypatch):
    """PyTorch passes over it now and then, and the run went on."""

    class PassesOver(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == agent.__name__:
                with suppress(KeyboardInterrupt):
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # others run in tests

    (tmp_path / "train.py").touch()
    for name in ("SHARDWRIGHT_RUN_DIR", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delitem(sys.modules, agent.__name__)
    monkeypatch.setattr(sys, "meta_path", [PassesOver(), *sys.meta_path])
    request = LaunchRequest(target=str(tmp_path / "train.py"), run_folder=tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests may leave another one
    try:
        with pytest.raises(KeyboardInterrupt):
            launching.launch(request, report=print)
    finally:
        signal.signal(signal.SIGINT, before)
