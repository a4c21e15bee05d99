"""The beginning of a run: ``smp.init``."""

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import shardwright.torch as sw
from shardwright.errors import library_named
from shardwright.torch.startup import script_run
from smdistributed.modelparallel.configuration import read_configuration
from smdistributed.modelparallel.partition_file import settings_with_partition
from smdistributed.modelparallel.ranks_of_run import ranks_of_run
from smdistributed.modelparallel.torch.random_states import let_trainer_load
from smdistributed.modelparallel.torch.state_mod import current_run, state


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts a run; call it first, once on every rank.

    Called again without settings, or with the same ones, it does nothing.

    Args:
        config: settings by their names in SageMaker's library. ``SM_HP_MP_PARAMETERS`` wins over them.

    Raises:
        ConfigError: settings contradict each other, or ask for what is not there yet.
    """
    configuration = read_configuration(config, os.environ, sys.argv[1:])
    if ranks_of_run.is_begun_with(configuration, given=config is not None):
        return
    sw.init(settings_with_partition(configuration.settings, configuration.values))
    let_trainer_load()
    current = script_run()
    current.cleanup.enter_context(library_named("smp"))
    try:
        state.begin(configuration)
        remarks = ranks_of_run.remarks()
    except BaseException:
        shutdown()
        raise
    if current.rank == 0:
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)


def shutdown() -> None:
    """Ends a run, so that another one can begin in this process."""
    sw.shutdown()
    state.reset()


def is_initialized() -> bool:
    """Whether ``smp.init`` was called."""
    return state.initialized


def num_microbatches() -> int:
    """The number of parts into which each batch is split."""
    return current_run().config.microbatches or 1
