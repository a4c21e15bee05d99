"""Starts a run."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from shardwright.config import Config
from shardwright.observe.trackers import Tracker
from shardwright.plan import Plan
from shardwright.run.context import context, set_context
from shardwright.run.reporting import Facts, Reporter
from shardwright.run.startup import begun, settings_of_call
from shardwright.torch.data import samplers_checked, seed_everything
from shardwright.torch.interception.backward_calls import (
    backward_of_results_refused,
    refuse_updates_inside_steps,
)
from shardwright.torch.loss_scale import scalers_agree, scaling_noted
from shardwright.torch.optimizer.clipping import norm_over_stages
from shardwright.torch.optimizer.refused_optimizers import refuse_optimizers_inside_steps
from shardwright.torch.script_run import ScriptRun
from shardwright.torch.step_end.training_alike import streams_noted
from shardwright.torch.sums_over_ranks import metrics_over_replicas
from shardwright.torch.tensor_parallel.divided_tensor import local_of


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
            for tensor in _state(run):
                if isinstance(tensor, Tensor) and tensor.device == run.device:
                    storage = local_of(tensor).untyped_storage()
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
