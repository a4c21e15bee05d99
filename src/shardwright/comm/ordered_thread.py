"""A thread that does what it is told, one thing after the other."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

__all__ = ["OrderedThread"]

_LONGEST_END_S = 1.0

_Task = tuple[Callable[[], Any], "Future[Any]"]


class OrderedThread:
    """Runs the collectives of one group in the order in which they were asked for.

    Two threads on one group would each pick an order of their own, and ranks that pick different ones wait
    for one another for ever. What is to be waited for anyway runs on the thread that asks, if nothing is in
    front.

    Args:
        name: of the thread, for those who look at a stack.
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._busy = threading.Lock()  # held by whoever runs a task
        self._num_waiting = 0
        self._counting = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> "Future[Any]":
        """Has the thread do something; the future gets its result, or its error."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks, self._busy, weakref.ref(self)), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _stop, self._tasks, self._thread)
        future: Future[Any] = Future()
        with self._counting:
            self._num_waiting += 1
        self._tasks.put((task, future))
        return future

    def run(self, task: Callable[[], Any]) -> Any:
        """Does something now, or as soon as what is in front is done; returns its result."""
        with self._counting:
            at_once = self._num_waiting == 0 and self._busy.acquire(blocking=False)
        if not at_once:
            return self.submit(task).wait()
        try:
            return task()
        finally:
            self._busy.release()

    def _done(self) -> None:
        with self._counting:
            self._num_waiting -= 1


def _serve(
    tasks: "queue.SimpleQueue[_Task | None]", busy: threading.Lock, owner: "weakref.ref[OrderedThread]"
) -> None:
    torch.set_grad_enabled(False)  # of this thread
    while (item := tasks.get()) is not None:
        task, future = item
        with busy:
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        del item, task, future
        if (thread := owner()) is not None:
            thread._done()
        del thread


def _stop(tasks: "queue.SimpleQueue[_Task | None]", thread: threading.Thread) -> None:
    """Ends the thread, also when the interpreter ends: one that still works then may abort the process."""
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_LONGEST_END_S)
