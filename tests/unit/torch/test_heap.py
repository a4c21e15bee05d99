"""Freed memory stays with the process."""

import subprocess
import sys
import textwrap

import pytest

from shardwright.torch.heap import keep_freed_memory

STEP = """
    import resource
    import torch
    from shardwright.torch.heap import keep_freed_memory

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def step():
        return [torch.ones(2**18) for _ in range(32)]  # 32 MiB in blocks of 1 MiB

    assert keep_freed_memory()
    step()
    before = faults()
    step()
    print(faults() - before, 32 * 2**20 // resource.getpagesize())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a matter of glibc")
def test_a_second_step_finds_the_memory_of_the_first():
    if not keep_freed_memory():
        pytest.skip("another C library")
    command = [sys.executable, "-c", textwrap.dedent(STEP)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    faults, pages = map(int, output.split())
    assert faults < pages / 10
