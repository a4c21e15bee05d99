"""What threads and signal handlers of a script write while it is traced is no change of the trace."""

import os
import queue
import signal
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

from shardwright.torch.python_state.written_elsewhere import names_written_elsewhere
from shardwright.torch.units.module_costs import discover

stops = False


def trace(model, step):
    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))


class Loader:
    """Loads batches in a thread, and counts them; its users count, too."""

    def __init__(self) -> None:
        self.next_batch = self.num_used = 0
        self.names: dict[str, int] = {}
        self.asked: queue.Queue = queue.Queue()
        self.loaded: queue.Queue = queue.Queue()
        self.thread = threading.Thread(target=self.load, daemon=True)
        self.thread.start()

    def load(self) -> None:
        while self.asked.get():
            self.advance()
            self.loaded.put(self.next_batch)

    def advance(self) -> None:
        self.next_batch += 1
        self.names["newest"] = self.next_batch


def test_a_thread_goes_on_where_it_was():
    """Its count was put back by the trace, and batches came twice, without a word."""
    loader, model, num_steps = Loader(), nn.Linear(4, 4), 0

    def step(x):
        nonlocal num_steps
        num_steps += 1
        loader.num_used += 1
        loader.asked.put(True)
        loader.loaded.get(timeout=20)
        return model(x).sum()

    trace(model, step)
    assert loader.next_batch == loader.names["newest"] > 0
    assert (num_steps, loader.num_used) == (0, 0)
    loader.asked.put(False)
    loader.thread.join()


class InSlots:
    """Keeps what its thread counts in slots and in a class."""

    __slots__ = ("asked", "count", "loaded", "rows")
    of_all: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[int] = []
        self.asked: queue.Queue = queue.Queue()
        self.loaded: queue.Queue = queue.Queue()

    def load(self) -> None:
        while self.asked.get():
            self.advance()
            self.loaded.put(True)

    def advance(self) -> None:
        self.count += 1
        self.rows.append(self.count)
        self.of_all.append(self.count)


class Layer(nn.Linear):
    of_all = InSlots.of_all


def test_slots_and_attributes_of_classes_go_on_too():
    """A trace took out again what the thread had written there."""
    loader, model = InSlots(), Layer(4, 4)
    thread = threading.Thread(target=loader.load, daemon=True)
    thread.start()

    def step(x):
        loader.asked.put(True)
        loader.loaded.get(timeout=20)
        return model(x).sum()

    trace(model, step)
    assert loader.count > 0
    assert loader.rows == Layer.of_all == [*range(1, loader.count + 1)]
    loader.asked.put(False)
    thread.join()


class Loads:
    def __init__(self) -> None:
        self.asked: queue.Queue = queue.Queue()
        self.begun: queue.Queue = queue.Queue()

    def run(self) -> None:
        self.begun.put(True)
        while self.asked.get():
            self.work()


class LoadsImages(Loads):
    def work(self) -> None:
        self.num_images = 1


class LoadsTexts(Loads):
    def work(self) -> None:
        self.num_texts = 1


def test_threads_that_share_a_method_of_a_base_class():
    """Only what the first one writes in methods of its own class was known."""
    loaders = LoadsImages(), LoadsTexts()
    threads = [threading.Thread(target=each.run, daemon=True) for each in loaders]
    for loader, thread in zip(loaders, threads, strict=True):
        thread.start()
        loader.begun.get(timeout=20)
    found = names_written_elsewhere()
    for loader, thread in zip(loaders, threads, strict=True):
        loader.asked.put(False)
        thread.join()
    assert found >= {"num_images", "num_texts"}


@pytest.fixture
def handled():
    """A signal of which a script takes note."""

    global stops

    def handler(*_):
        global stops
        stops = True

    before = signal.signal(signal.SIGUSR2, handler)
    yield
    signal.signal(signal.SIGUSR2, before)
    stops = False


@pytest.mark.usefixtures("handled")
def test_a_signal_is_not_forgotten():
    """One that came in a trace was: the script went on until it was killed."""
    model = nn.Linear(4, 4)

    def step(x):
        os.kill(os.getpid(), signal.SIGUSR2)
        return model(x).sum()

    assert "stops" in names_written_elsewhere()
    trace(model, step)
    assert stops


def test_code_of_this_thread_and_of_libraries_is_not_meant():
    written = names_written_elsewhere()
    assert written.isdisjoint({"next_batch", "num_used", "_value"})
