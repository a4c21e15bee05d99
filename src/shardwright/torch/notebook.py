"""Runs a function of a notebook on several ranks of its machine.

The ranks are forked from the notebook's process, so that they have everything that its cells have defined::

    notebook ──fork──► rank 0: function(*args) ──► result, as a file
             └─fork──► rank 1: function(*args)
"""

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from shardwright.comm.codec import decode, encode
from shardwright.errors import ConfigError, UsageError
from shardwright.run.context import is_initialized
from shardwright.run.startup import shutdown

_RESULT = "result"


def notebook_launcher(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Runs a function on several ranks of this machine, from a notebook or an interactive session.

    The function calls `shardwright.torch.init` and trains, as a script does. What ranks print appears while
    they run. On CPUs each rank computes with one thread: start larger trainings as scripts.

    Args:
        function: what each rank runs; it may be defined in a cell.
        ranks: how many.
        *args: its arguments.

    Returns:
        What the function returned on rank 0: numbers, text, tensors, and containers of them.

    Raises:
        UsageError: this process trains itself, has used its GPUs, or cannot be forked.
        torch.multiprocessing.ProcessRaisedException: the function raised on some rank; the others are ended.

    Example:
        >>> import shardwright.torch as sw
        >>> def double(number):
        ...     sw.init({"run_dir": "off"})
        ...     return sw.size(), 2 * number
        >>> sw.notebook_launcher(double, 2, 21)
        (2, 42)
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"notebook_launcher was asked for {ranks!r} ranks. Give a whole number from 1.")
    _refuse_used_process()
    with tempfile.TemporaryDirectory(prefix="shardwright-notebook-") as folder:
        arguments = (function, args, ranks, _free_port(), folder)
        with warnings.catch_warnings():
            # Since Python 3.12: a kernel has threads of its own, whose code no rank runs.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            start_processes(_run_rank, arguments, nprocs=ranks, start_method="fork")  # type: ignore[no-untyped-call]
        return decode(Path(folder, _RESULT).read_bytes())


def _run_rank(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], ranks: int, port: int, folder: str
) -> None:
    """One rank, in a process of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # The pool of OpenMP does not survive a fork: with more threads the first product would wait for ever.
    torch.set_num_threads(1)
    result = function(*args)
    if rank == 0:
        Path(folder, _RESULT).write_bytes(encode(result))
    shutdown()  # forked processes run nothing at their exit, and the report is written here
    sys.stdout.flush()
    sys.stderr.flush()


def _refuse_used_process() -> None:
    if not hasattr(os, "fork"):
        raise UsageError(
            "this system cannot fork, so a notebook cannot start ranks. Run a script instead: "
            "shardwright run -n 2 train.py."
        )
    if is_initialized():
        raise UsageError(
            "sw.init was called in the notebook itself, and the ranks would take over its run. Call it "
            "inside the function that notebook_launcher runs, and sw.shutdown() in the notebook first."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            "this process has used a GPU, which forked ranks then cannot. Restart the notebook's kernel, and "
            "use GPUs only inside the function that notebook_launcher runs."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
