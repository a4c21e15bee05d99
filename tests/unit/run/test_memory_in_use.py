"""Memory that a process uses now."""

import platform

import pytest
import torch

from shardwright.run import memory
from shardwright.run.memory import memory_in_use as in_use

MIB = 2**20
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's mallinfo2")


@needs_glibc
def test_a_tensor_counts_as_long_as_it_lives():
    cpu = torch.device("cpu")
    before = in_use(cpu)
    tensor = torch.zeros(64 * MIB, dtype=torch.uint8)
    there = in_use(cpu)
    del tensor
    assert there - before == pytest.approx(64 * MIB, rel=0.05)
    assert in_use(cpu) - before < 4 * MIB


def test_where_it_cannot_be_told_it_is_not_known(monkeypatch):
    monkeypatch.setattr(memory, "_mallinfo2", lambda: None)
    assert in_use(torch.device("cpu")) == 0
