"""A folder of its own for each checkpoint, as loops of other libraries have it."""

import os
from pathlib import Path

import pytest
import torch

import shardwright.torch as sw

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
