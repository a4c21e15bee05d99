"""The beginning of a run: ``smp.init``."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import shardwright.tensorflow as sw
from shardwright.errors import library_named
from shardwright.tensorflow.keras_run import keras_run
from smdistributed.modelparallel.configuration import read_configuration
from smdistributed.modelparallel.partition_file import settings_with_partition, store_partition
from smdistributed.modelparallel.ranks_of_run import present_run, ranks_of_run


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts a run; call it first, once on every rank, before any operation of TensorFlow.

    Called again without settings, or with the same ones, it does nothing.

    Args:
        config: settings by their names in SageMaker's library. ``SM_HP_MP_PARAMETERS`` wins over them.

    Raises:
        ConfigError: settings contradict each other, or ask for what is not there.
    """
    configuration = read_configuration(config, os.environ, sys.argv[1:])
    if ranks_of_run.is_begun_with(configuration, given=config is not None):
        return
    sw.init(settings_with_partition(configuration.settings, configuration.values))
    run = keras_run()
    run.cleanup.enter_context(library_named("smp"))
    try:
        ranks_of_run.begin(configuration)
        remarks = ranks_of_run.remarks()
    except BaseException:
        shutdown()
        raise
    # The script averages them itself, by horovod.tensorflow.
    run.averages_replicas = not configuration.values["horovod"]
    run.after_placement.append(store_partition)
    if run.rank == 0:
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)


def shutdown() -> None:
    """Ends a run, so that another one can begin in this process."""
    sw.shutdown()
    ranks_of_run.reset()


def is_initialized() -> bool:
    """Whether ``smp.init`` was called."""
    return ranks_of_run.initialized


def num_microbatches() -> int:
    """The number of parts into which each batch is split."""
    return present_run().config.microbatches or 1


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Has a function run once, eagerly, when the first step has placed the layers, before it runs them."""
    present_run()
    keras_run().after_placement.append(hook)
    return hook
