"""Freed memory stays with the process."""

import platform
import subprocess
import sys
import textwrap

import pytest

from shardwright.run.memory import keep_freed_memory

STEP = """
    import resource
    import torch
    from shardwright.run.memory import keep_freed_memory

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def step():
        return [torch.ones({block} // 4) for _ in range({blocks})]

    assert keep_freed_memory()
    def new_pages():
        before = faults()
        step()
        return faults() - before

    # Small blocks that lie between large ones find their places in the course of some steps.
    pages = sorted(new_pages() for _ in range(25))
    print(pages[12], {block} * {blocks} // resource.getpagesize())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a matter of glibc")
@pytest.mark.parametrize(("block", "blocks"), [(2**20, 32), (48 * 2**20, 2)], ids=["small", "large"])
def test_a_step_finds_the_memory_of_earlier_ones(block, blocks):
    if not keep_freed_memory():
        pytest.skip("another C library")
    if block > 32 * 2**20 and tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35):
        pytest.skip("this glibc always gives back blocks over 32 MiB")
    command = [sys.executable, "-c", textwrap.dedent(STEP.format(block=block, blocks=blocks))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    faults, pages = map(int, output.split())
    assert faults < pages / 10
