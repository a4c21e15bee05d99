"""Runs a function on several ranks of this machine."""

import functools
import os
import secrets
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwright.comm.codec import decode
from shardwright.comm.joining.run_secret import Seal, unpacked
from shardwright.errors import UsageError
from shardwright.testing.client import this_process_client
from shardwright.testing.job import (
    Job,
    Outcome,
    RankFiles,
    RankReport,
    RanksFailedError,
    RankStatus,
    payload,
    value_place,
)

T = TypeVar("T")
Environ = Mapping[str, str | None] | Callable[[int], Mapping[str, str | None]]

_MAX_RANKS = 64
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PET_")
_LAUNCHER_NAMES = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_PORT",
)


def run_ranks(
    function: Callable[..., T],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 1.0,
    env: Environ | None = None,
    preload: Sequence[str] = (),
    init_process_group: bool = True,
    group_timeout_s: float | None = None,
    **kwargs: Any,
) -> list[T]:
    """Runs ``function(*args, **kwargs)`` on every rank and returns the results in the order of the ranks.

    The ranks are processes of this machine, in one gloo process group, with one thread each for
    computation, and with the variables that torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR``, ...). The function may be local to a test; it, its arguments and its result travel
    by cloudpickle. Warnings are filtered as they are for the caller. What the ranks print appears on
    the caller's stdout and stderr when they are done.

    On Linux ranks 1, 2, 4, 7, ... have another hash seed than ranks 0, 3, 5, 6, ..., so that sets of names
    have other orders there, as they have in ranks that a launcher starts. ``PYTHONHASHSEED`` in the caller's
    environment, where it is set, is that of rank 0.

    Example, a test of your own model::

        def test_gradients_are_averaged():
            def gradient_of_rank():
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
                model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
                return model.module.weight.grad.mean().item()

            assert run_ranks(gradient_of_rank, 2) == [0.5, 0.5]

    Args:
        function: what each rank runs; it asks ``torch.distributed.get_rank()`` who it is.
        num_ranks: how many ranks, 1 to 64.
        timeout_s: seconds for the whole call. Then every rank's Python stacks are collected and all are
            killed.
        grace_s: seconds that the others get after the first rank failed, to fail by themselves.
        env: environment variables to set, or to remove where the value is None: one mapping for all, or
            a function from the rank to its mapping.
        preload: modules that the fork server imports before it forks, to save each rank the time. They
            must start no threads.
        init_process_group: False leaves it to the function, where ``dist.init_process_group("gloo")``
            will do. As under torchrun the store outlives the group: to make a second default group,
            prefix the store.
        group_timeout_s: the timeout of the process group; by default longer than `timeout_s`, so that a
            hang ends with stacks rather than with gloo's error.

    Raises:
        RanksFailedError: a rank raised, died or did not end. Its text has every traceback, the first
            cause first.
        UsageError: the call itself is wrong.
        LaunchError: the fork server cannot run.
    """
    __tracebackhide__ = True
    outcomes = run_ranks_outcomes(
        functools.partial(function, *args, **kwargs),
        num_ranks,
        timeout_s=timeout_s,
        grace_s=grace_s,
        env=env,
        preload=preload,
        init_process_group=init_process_group,
        group_timeout_s=group_timeout_s,
    )
    if not all(outcome.ok for outcome in outcomes):
        error = RanksFailedError(outcomes, timeout_s=timeout_s)
        error.add_note(f"Their hash seeds again: PYTHONHASHSEED={this_process_client().hash_seed}")
        raise error
    _replay_output(outcomes)
    return [outcome.value for outcome in outcomes]


def run_ranks_outcomes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
    env: Environ | None = None,
    preload: Sequence[str] = (),
    init_process_group: bool = True,
    group_timeout_s: float | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Like `run_ranks`, for tests in which ranks are meant to fail: returns what became of each.

    Example, what the others see when a rank is killed::

        def lose_rank_1():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        outcomes = run_ranks_outcomes(lose_rank_1, 2, timeout_s=10)
        assert outcomes[1].exit_code == -signal.SIGKILL
        assert "Connection" in outcomes[0].error

    Args:
        function: as for `run_ranks`, and so are the arguments that are not listed here.
        grace_s: by default None: after a failure the others may take until the timeout.

    Raises:
        UsageError: the call itself is wrong.
        LaunchError: the fork server cannot run.
    """
    __tracebackhide__ = True
    _check(num_ranks, timeout_s=timeout_s)
    client = this_process_client()
    folder = Path(tempfile.mkdtemp(prefix="shardwright-ranks-"))
    key = secrets.token_bytes(32)
    seal = Seal(key)
    try:
        job = Job(
            key=key,
            payload=payload((function, args, kwargs, list(warnings.filters)), function=function, seal=seal),
            environ=tuple(_environ(rank, num_ranks, env) for rank in range(num_ranks)),
            working_folder=os.getcwd(),
            search_path=tuple(sys.path),
            preload=tuple(dict.fromkeys((*client.preload, *_pytest_modules(), *preload))),
            timeout_s=timeout_s,
            grace_s=grace_s,
            group_timeout_s=group_timeout_s or timeout_s + 60.0,
            init_process_group=init_process_group,
            folder=str(folder),
        )
        return [_outcome(folder, status, seal) for status in client.run(job)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(num_ranks: int, *, timeout_s: float) -> None:
    if not hasattr(os, "fork"):
        raise UsageError(f"run_ranks forks processes, which {sys.platform} cannot. Use Linux or macOS.")
    if not 1 <= num_ranks <= _MAX_RANKS:
        raise UsageError(f"num_ranks is {num_ranks}. Ask for 1 to {_MAX_RANKS}: they share this machine.")
    if timeout_s <= 0:
        raise UsageError(f"timeout_s is {timeout_s}. Give the ranks a positive number of seconds.")


def _environ(rank: int, num_ranks: int, env: Environ | None) -> dict[str, str]:
    """One rank's whole environment; the server adds ``MASTER_PORT``, where the job's store listens."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    environ |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    # The store has a process of its own, as under torchrun, so no rank may try to serve it.
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if loopback := _loopback_interface():
        # Else gloo looks up the machine's name, which need not resolve.
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # The TCP store looks up the names of its peers: a name server that drops packets should cost 1 s, not 5.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    wanted = env(rank) if callable(env) else env or {}
    environ |= {name: value for name, value in wanted.items() if value is not None}
    return {name: value for name, value in environ.items() if wanted.get(name, "") is not None}


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _pytest_modules() -> tuple[str, ...]:
    """What functions of a pytest module refer to once pytest has rewritten their assertions."""
    return ("_pytest.assertion.rewrite",) if "_pytest.assertion.rewrite" in sys.modules else ()


def _outcome(folder: Path, status: RankStatus, seal: Seal) -> Outcome:
    files = RankFiles(folder, status.rank)
    report = RankReport(at_s=status.ended_at_s)  # of a rank that died without a word
    if files.report.exists():
        report = decode(files.report.read_bytes())
    place = value_place(status.rank)
    return Outcome(
        rank=status.rank,
        returned=report.value is not None,
        value=None if report.value is None else unpacked(report.value, seal, place),
        error=report.error,
        error_type=report.error_type,
        error_line=report.error_line,
        exception=None if report.exception is None else unpacked(report.exception, seal, place),
        exit_code=status.exit_code,
        seconds=report.at_s - status.started_at_s,
        stopped=status.stopped,
        was_held=status.was_held,
        stdout=_text(files.stdout),
        stderr=_text(files.stderr),
        stacks=_without_our_frames(_text(files.stacks)),
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _without_our_frames(stacks: str) -> str:
    """Drops the frames between the server's start and the call of the user's function."""
    lines = stacks.splitlines(keepends=True)
    return "".join(line for line in lines if not ("shardwright/testing/" in line or "<frozen runpy>" in line))


def _replay_output(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        for stream, text in ((sys.stdout, outcome.stdout), (sys.stderr, outcome.stderr)):
            stream.writelines(f"[rank {outcome.rank}] {line}\n" for line in text.splitlines())
