"""A folder of its own for each checkpoint, as loops of other libraries have it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.observe.run_folder import hold

FILES = Path("/proc/self/fd")


@pytest.mark.skipif(not FILES.is_dir(), reason="counts open files in /proc")
def test_closed_checkpoints_keep_no_file_open(tmp_path: Path) -> None:
    """Each kept its lock until the process ended, so a long training ran out of open files."""
    sw.init({"run_dir": "off"})
    try:
        sw.DistributedModel(torch.nn.Linear(2, 1))
        counts = []
        for number in range(4):
            checkpoints = sw.Checkpoints(tmp_path / str(number), asynchronous=False, signals=())
            checkpoints.save(number + 1)
            checkpoints.close()
            counts.append(len(os.listdir(FILES)))
        assert len(set(counts[1:])) == 1
    finally:
        sw.shutdown()


def test_a_save_after_the_close_takes_the_folder_again(tmp_path: Path) -> None:
    sw.init({"run_dir": "off"})
    try:
        sw.DistributedModel(torch.nn.Linear(2, 1))
        checkpoints = sw.Checkpoints(tmp_path, asynchronous=False, signals=())
        checkpoints.close()
        with (
            held_by_another_process(tmp_path / ".lock"),
            pytest.raises(UsageError, match="another run saves"),
        ):
            checkpoints.save(1)
        checkpoints.save(1)
        assert hold(tmp_path / ".lock") is None, "this process holds it"
        checkpoints.close()
    finally:
        sw.shutdown()


@contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    """A child locks the file: locks of one process do not hinder itself."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        yield
        assert child.stdin is not None
        child.stdin.close()


_HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
sys.stdout.write("x")
sys.stdout.flush()
sys.stdin.read()
"""
