"""The budget for timing goes to each kind of unit once, and then to what leaves most in doubt.

Freed memory stays with the process; memory that a process uses now.

Children that multiprocessing spawns, and that import the script.
"""

import multiprocessing
import platform
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.run import memory
from shardwright.run.memory import keep_freed_memory
from shardwright.run.memory import memory_in_use as in_use
from shardwright.run.timing import Share, Timing, Turns


def timing(seconds=1.0, spread=0.0):
    return Timing(forward_s=seconds / 3, backward_s=2 * seconds / 3, spread=spread)


SHARES = {
    "block of 8": Share("block", 10.0, 2),
    "block of 4": Share("block", 10.0, 4),
    "head of 8": Share("head", 30.0, 2),
    "head of 4": Share("head", 30.0, 4),
    "head of 2": Share("head", 30.0, 8),
    "norm of 8": Share("norm", 0.1, 2),
}


def taken(turns, *, each_s=1.0, timings=None):
    """The classes that were timed, in order, if each takes so long."""
    keys, spent_s = [], 0.0
    while (key := turns.next(spent_s)) is not None:
        keys.append(key)
        turns.add(key, (timings or {}).get(key, timing()))
        spent_s += each_s
        assert len(keys) < 100
    return keys


def test_each_kind_comes_once_before_any_comes_twice_and_the_dearest_first():
    keys = taken(Turns(SHARES, budget_s=100.0))
    assert keys[:3] == ["head of 8", "block of 8", "norm of 8"]


def test_then_the_size_that_differs_most_and_nothing_between_two():
    """What lies between two sizes is interpolated; without spread, nothing is timed twice."""
    assert taken(Turns(SHARES, budget_s=100.0))[3:] == ["head of 2"]


@pytest.mark.parametrize(("budget_s", "number"), [(0.5, 1), (2.0, 2), (3.5, 4)])
def test_nothing_begins_when_the_budget_is_spent(budget_s, number):
    assert len(taken(Turns(SHARES, budget_s=budget_s))) == number


def test_a_model_with_short_steps_is_not_timed_for_long():
    """A toy was timed for up to five seconds: each kind once is enough where a step takes no time."""
    tiny = {key: timing(1e-4, spread=2.0) for key in SHARES}
    keys = taken(Turns(SHARES, budget_s=100.0), timings=tiny, each_s=0.05)
    assert len(keys) == 4  # 0.2 s
    keys = taken(Turns(SHARES, budget_s=100.0), timings=tiny, each_s=0.5)
    assert keys == ["head of 8", "block of 8", "norm of 8"]


def test_the_widest_spread_is_timed_again():
    wide = {"head of 8": timing(spread=0.6), "block of 8": timing(spread=0.02)}
    keys = Counter(taken(Turns(SHARES, budget_s=100.0), timings=wide))
    assert keys["head of 8"] > 2
    assert keys["block of 8"] == keys["head of 2"] == 1


def test_what_is_remembered_is_not_timed_and_stands_for_its_kind():
    remembered = {"head of 8": timing(), "block of 8": timing(), "block of 4": timing()}
    assert taken(Turns(SHARES, 100.0, remembered)) == ["norm of 8", "head of 2"]
    assert taken(Turns({"head of 8": Share("head", 1.0)}, 100.0, remembered)) == []


def test_what_cannot_be_run_is_tried_once():
    turns = Turns(SHARES, budget_s=100.0)
    while (key := turns.next(0.0)) is not None:
        turns.add(key, None if key.startswith("norm") else timing())
    assert turns.failed == {"norm of 8"}


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


def test_a_worker_that_imports_the_script_again_is_no_rank(monkeypatch):
    """It has the variables of its rank: "a stranger has written them, or a rank with another secret"."""
    # As `multiprocessing.spawn` marks a child until it has imported the script.
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="imports this script again, and is no rank of the run"):
        sw.init({"run_dir": "off"})
    assert not sw.is_initialized()
