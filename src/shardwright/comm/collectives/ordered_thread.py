"""A thread that runs its tasks in order, and the handle of a running collective."""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_LONGEST_END_S = 1.0


class OrderedThread:
    """Runs the collectives of one group in the order in which they were asked for.

    Two threads on one group would each pick an order of their own, and ranks that pick different ones wait
    for one another for ever. What is to be waited for anyway runs on the thread that asks, if nothing is in
    front. What a task asks for runs at once, as a part of it.

    Tasks run in inference mode, whoever runs them: they may write to tensors of either mode, and what they
    keep for the next task is of one mode.
    """

    def __init__(self, name: str):
        self._turns = _Turns()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> "Future[Any]":
        """Has the thread do something; the future gets its result, or its error."""
        future: Future[Any] = Future()
        if self._turns.is_mine:
            _settle(future, task)
            return future
        with self._counting:
            if self._thread is None:
                self._start()
            self._num_waiting += 1
            self._turns.tasks.put((task, future, self._done))
        return future

    def run(self, task: Callable[[], Any]) -> Any:
        """Runs a task once earlier ones are done; returns its result."""
        if self._turns.is_mine:
            return task()
        with self._counting:
            at_once = self._num_waiting == 0 and self._turns.begin(blocking=False)
        if not at_once:
            return self.submit(task).wait()
        try:
            with torch.inference_mode():
                return task()
        finally:
            self._turns.end()

    def _start(self) -> None:
        self._thread = threading.Thread(target=_serve, args=(self._turns,), name=self._name, daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._turns, self._thread)

    def _done(self) -> None:
        with self._counting:
            self._num_waiting -= 1


class _Turns:
    """The runner of a task, and those that wait."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy = threading.Lock()
        self._runner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread runs a task."""
        return self._runner == threading.get_ident()

    def begin(self, *, blocking: bool) -> bool:
        if not self._busy.acquire(blocking=blocking):
            return False
        self._runner = threading.get_ident()
        return True

    def end(self) -> None:
        self._runner = None
        self._busy.release()


def _serve(turns: _Turns) -> None:
    while (item := turns.tasks.get()) is not None:
        task, future, done = item
        result, error = None, None
        turns.begin(blocking=True)
        try:
            with torch.inference_mode():
                result = task()
        except BaseException as raised:
            error = raised
        finally:
            turns.end()
        done()
        # Behind the turn: who waits for it may ask for the next task at once, in a callback too.
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del item, task, future, done, result, error


def _settle(future: "Future[Any]", task: Callable[[], Any]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


def _stop(turns: _Turns, thread: threading.Thread) -> None:
    """Ends the thread, also when the interpreter ends: one that still works then may abort the process."""
    turns.tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_LONGEST_END_S)


_Work: Any = dist.Work


class CollectiveWork(_Work):  # type: ignore[misc]
    """A collective that a thread does; FSDP2 waits for work of this base class only."""

    def __init__(self, future: "Future[list[Tensor]]"):
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end; raises the collective's error. The group's own timeout counts."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that it raised, or None."""
        try:
            self._future.wait()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._future.wait()

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that C++ can read: an exception of Python is an error of it, not its value."""
        return self._future.then(lambda done: done.value())
