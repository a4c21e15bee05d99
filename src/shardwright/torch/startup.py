"""Starts a run, from a script or on the ranks of a notebook; its model, optimizers and reporter.

The ranks are forked from the notebook's process, so that they have everything that its cells have defined::

    notebook ──fork──► rank 0: function(*args) ──► result, as a file
             └─fork──► rank 1: function(*args)
"""

import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from shardwright.comm.codec import decode, encode
from shardwright.config import Config
from shardwright.errors import ConfigError, UsageError
from shardwright.observe.trackers import Tracker
from shardwright.plan import Plan
from shardwright.run.context import Context, context, is_initialized, set_context
from shardwright.run.joining import begun, settings_of_call, shutdown
from shardwright.run.reporting import Facts, Reporter
from shardwright.torch.data import samplers_checked, seed_everything
from shardwright.torch.interception.backward_calls import (
    backward_of_results_refused,
    refuse_updates_inside_steps,
)
from shardwright.torch.loss_scale import scalers_agree, scaling_noted
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.clipping import norm_over_stages
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.optimizer.packed_tensor import memory_of_moment
from shardwright.torch.optimizer.refused_optimizers import refuse_optimizers_inside_steps
from shardwright.torch.step_end.training_alike import streams_noted
from shardwright.torch.sums_over_ranks import metrics_over_replicas
from shardwright.torch.tensor_parallel.divided_tensor import local_of


class ScriptRun(Context):
    """A run, with the classes of this front end."""

    __slots__ = ()

    model: DistributedModel | None
    optimizers: list[DistributedOptimizer]
    reporter: Reporter | None


def script_run() -> ScriptRun:
    current = context()
    if not isinstance(current, ScriptRun):
        raise UsageError("this run was not begun by a script. Call shardwright.torch.init().")
    return current


def init(
    config: "Mapping[str, Any] | Config | Plan | str | os.PathLike[str] | None" = None, **others: Any
) -> None:
    """Starts a run; call it first, once, on every rank.

    Finds the ranks from the environment (torchrun, Slurm, MPI, ... or a single process), joins them, and
    reads the settings. What the launcher was told (``--set``, ``--config``, ``--plan``) wins over `config`.

    Args:
        config: settings, or a plan, or the path of a plan file.

    Raises:
        UsageError: it was called before, or got settings by keyword.
        ConfigError: a setting is unknown, out of range or contradicts another.
        PlanError: the plan file cannot be used.
    """
    begin(*settings_of_call(config, others))


def begin(settings: Config, plan: Plan | None) -> None:
    """Starts a run with settings that are known, and a plan to follow if there is one."""
    made = begun(settings, plan, kind=ScriptRun, facts=_facts)
    made.cleanup.callback(refuse_optimizers_inside_steps().remove)
    refuse_updates_inside_steps(made.cleanup)
    made.cleanup.enter_context(backward_of_results_refused())
    made.cleanup.enter_context(scaling_noted())
    if made.mesh.spreads_model:
        made.cleanup.enter_context(samplers_checked())
        metrics_over_replicas()
    if made.mesh.data > 1:
        made.cleanup.enter_context(streams_noted())
    if made.mesh.spreads_model or made.mesh.shard > 1:
        norm_over_stages()
        made.cleanup.enter_context(scalers_agree())
    set_context(made)
    if settings.seed is not None:
        seed_everything(settings.seed)


def add_tracker(tracker: Tracker) -> None:
    """Has an object told of the metrics of each training step, on the first rank.

    Call it on all ranks, after `init`.

    Args:
        tracker: with `begin`, `log` and `close` as in `shardwright.observe.trackers.Tracker`. What it raises
            ends it, with a message, and not the training.

    Raises:
        UsageError: `init` was not called.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> class Printer:
        ...     def begin(self, run): print("settings:", len(run.settings) > 10)
        ...     def log(self, metrics, *, step): print("step", step, "loss", round(metrics["train/loss"], 3))
        ...     def close(self): print("end")
        >>> sw.init({"run_dir": "off"})
        >>> sw.add_tracker(Printer())
        >>> model = sw.DistributedModel(torch.nn.Linear(2, 1))
        >>> @sw.step
        ... def train_step(model, x):
        ...     loss = model(x).mean() * 0 + 3
        ...     model.backward(loss)
        ...     return loss
        >>> _ = train_step(model, torch.ones(4, 2))
        settings: True
        step 1 loss 3.0
        >>> sw.shutdown()
        end
    """
    reporter = context().reporter
    assert isinstance(reporter, Reporter)
    reporter.track(tracker)


def _facts(run: ScriptRun) -> Facts:
    """What reports tell of the script's model and optimizers."""

    def learning_rate() -> float | None:
        # None where the optimizer finds one by itself, as Adafactor of transformers does.
        groups = (group for optimizer in run.optimizers for group in optimizer.param_groups)
        rate = next(groups, {}).get("lr")
        return None if rate is None else float(rate)

    def update_s() -> float | None:
        taken = [optimizer.clock.taken() for optimizer in run.optimizers]
        known = [seconds for seconds in taken if seconds is not None]
        return sum(known) if known else None

    def state_bytes() -> int | None:
        storages: dict[int, int] = {}
        try:
            kept = [local_of(each) for each in _state(run) if isinstance(each, Tensor)]
            for tensor in (part for each in kept for part in memory_of_moment(each)):
                if tensor.device == run.device:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, ValueError):  # a tensor without memory of its own: of a subclass, or a lazy one
            return None
        return sum(storages.values())

    def model() -> str:
        assert run.model is not None
        return type(run.model.get_module()).__name__

    return Facts(model=model, learning_rate=learning_rate, update_s=update_s, state_bytes=state_bytes)


def _state(run: ScriptRun) -> Iterator[object]:
    """Parameters, gradients, and what optimizers keep."""
    assert run.model is not None
    for parameter in run.model.get_module().parameters():
        yield from (parameter, parameter.grad)
    for wrapped in run.optimizers:
        for state in wrapped.optimizer.state.values():
            yield from state.values() if isinstance(state, dict) else ()


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
