"""Starts and ends a run."""

import os
from collections.abc import Mapping
from typing import Any

from shardwright.config import Config
from shardwright.config.misplaced import refuse_misplaced
from shardwright.errors import ShardwrightError, UsageError
from shardwright.observe.trackers import Tracker
from shardwright.plan import Plan
from shardwright.torch.interception.backward_outside import backward_of_results_refused
from shardwright.torch.interception.update_calls import refuse_updates_inside_steps
from shardwright.torch.loss_scale.grad_scaler import scalers_agree, scaling_noted
from shardwright.torch.measuring.reporting import Reporter
from shardwright.torch.optimizer.clipping import norm_over_stages
from shardwright.torch.optimizer.unwrapped_optimizers import refuse_optimizers_inside_steps
from shardwright.torch.run.brief_errors import be_brief
from shardwright.torch.run.context import context, is_initialized, set_context
from shardwright.torch.run.data import samplers_checked, seed_everything
from shardwright.torch.run.joining import joined
from shardwright.torch.run.joint_calls import prepare
from shardwright.torch.run.launch_settings import given_settings
from shardwright.torch.script_collectives.sums_over_ranks import metrics_over_replicas
from shardwright.torch.script_run import ScriptRun
from shardwright.torch.step_end.same_samples import streams_noted

__all__ = ["add_tracker", "begin", "init", "shutdown"]


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
    refuse_misplaced("sw.init", others, takes=("config",))
    if is_initialized():
        raise UsageError("init was called before. Call it once; shutdown() ends a run.")
    be_brief()
    settings, plan = given_settings(config)
    begin(settings, plan)


def begin(settings: Config, plan: Plan | None) -> None:
    """Starts a run with settings that are known, and a plan to follow if there is one."""
    made = joined(settings, plan, kind=ScriptRun)
    prepare(made)
    made.reporter = Reporter(made)
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


def shutdown() -> None:
    """Ends a run: a new one can be started with `init`. Process groups stay, for that one too."""
    if is_initialized():
        current = context()
        if current.watch.whereabouts is not None:
            current.watch.whereabouts.close(f"has called {ShardwrightError.library}.shutdown()")
        if current.reporter is not None:
            current.reporter.close()
        current.cleanup.close()  # a save under way is waited for, with messages between ranks
        if current.links.local_peers is not None:
            current.links.local_peers.close()
    set_context(None)
