"""The beginning of a run: ``smp.init``."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.torch.glue import active_handler
from shardwright.torch.tracer import Tracer
from smdistributed.modelparallel.configuration import Configuration, read_configuration
from smdistributed.modelparallel.torch.state_mod import current_run, state

__all__ = ["init", "is_initialized", "is_tracing", "num_microbatches", "shutdown"]


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts a run; call it first, once on every rank.

    Args:
        config: settings by their names in SageMaker's library. ``SM_HP_MP_PARAMETERS`` wins over them.

    Raises:
        ConfigError: settings contradict each other, or ask for what is not there yet.
        UsageError: it was called before with other settings.
    """
    configuration = read_configuration(config, os.environ)
    if state.initialized:
        _refuse_others(config, configuration)
        return
    sw.init(_settings(configuration))
    state.configuration = configuration
    if sw.rank() == 0:
        for remark in configuration.remarks:
            warnings.warn(remark, stacklevel=2)


def _settings(configuration: Configuration) -> dict[str, Any]:
    settings = dict(configuration.settings)
    if not settings.get("ddp"):
        settings.pop("ddp", None)
    return settings


def _refuse_others(config: Mapping[str, Any] | None, configuration: Configuration) -> None:
    if config is not None and configuration != state.configuration:
        raise UsageError(
            "smp.init was called before, with other settings, and a run has one set of them. Call it once."
        )


def shutdown() -> None:
    """Ends a run, so that another one can begin in this process."""
    sw.shutdown()
    state.__init__()  # type: ignore[misc]


def is_initialized() -> bool:
    """Whether ``smp.init`` was called."""
    return state.initialized


def is_tracing() -> bool:
    """Whether the step function runs only to see what it does, before the first step."""
    return isinstance(active_handler(), Tracer)


def num_microbatches() -> int:
    """The number of parts into which each batch is split."""
    return current_run().config.microbatches or 1


