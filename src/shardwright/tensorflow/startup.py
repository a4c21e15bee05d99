"""Starts a run."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import torch

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.plan import Plan
from shardwright.run.context import set_context
from shardwright.run.reporting import Facts
from shardwright.run.startup import begun, settings_of_call
from shardwright.tensorflow.callbacks import callbacks_over_ranks
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.loss_scales import loss_scales_over_stages
from shardwright.tensorflow.optimizer import optimizers_over_stages
from shardwright.tensorflow.plain_checkpoints import plain_checkpoints_over_ranks
from shardwright.tensorflow.whole import parts_over_ranks

# A step inside of a tf.function waits in one of these threads for pieces that need another.
_FEWEST_THREADS = 2


def init(
    config: "Mapping[str, Any] | Config | Plan | str | os.PathLike[str] | None" = None, **others: Any
) -> None:
    """Starts a run; call it first, once, on every rank, before any operation of TensorFlow.

    Finds the ranks from the environment (torchrun, Slurm, MPI, ... or a single process), joins them, and
    reads the settings, the same as for PyTorch.

    Args:
        config: settings, or a plan, or the path of a plan file.

    Raises:
        UsageError: it was called before, or got settings by keyword.
        ConfigError: a setting is unknown, out of range or contradicts another.
        PlanError: the plan file cannot be used.
    """
    settings, plan = settings_of_call(config, others)
    _set_threads()
    made = begun(settings, plan, kind=KerasRun, facts=_facts, check=refuse_what_is_missing)
    made.cleanup.enter_context(optimizers_over_stages(made))
    made.cleanup.enter_context(loss_scales_over_stages(made))
    made.cleanup.enter_context(callbacks_over_ranks(made))
    made.cleanup.enter_context(parts_over_ranks(made))
    made.cleanup.enter_context(plain_checkpoints_over_ranks(made))
    set_context(made)
    if settings.seed is not None:
        tf.keras.utils.set_random_seed(settings.seed)


def _facts(run: KerasRun) -> Facts:
    return Facts(model=lambda: type(run.keras_model).__name__)


def _set_threads() -> None:
    """One pool of threads for each rank, as PyTorch has it, and never too few for a step in a tf.function."""
    threading = tf.config.threading
    try:
        if threading.get_inter_op_parallelism_threads() < _FEWEST_THREADS:
            threading.set_inter_op_parallelism_threads(_FEWEST_THREADS)
        if threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    except RuntimeError as error:  # TensorFlow has run an operation, and has its threads
        if threading.get_inter_op_parallelism_threads() == 1:
            raise UsageError(
                "inter_op_parallelism_threads is 1 and TensorFlow runs already, so a step inside of a "
                "tf.function would wait for itself. Call sw.init before any operation, or set it to 2."
            ) from error
        warnings.warn(
            "TensorFlow has run operations before sw.init, so ranks may compute with more threads than "
            "there are cores for each. Call sw.init first.",
            stacklevel=3,
        )


def refuse_what_is_missing(run: KerasRun) -> None:
    """Refuses settings that this front end does not heed yet."""
    asked = {
        "tensor_parallel_degree": run.mesh.tensor > 1,
        "context_parallel_degree": run.mesh.context > 1,
        "expert_parallel_degree": run.mesh.expert > 1,
        "offload_activations": run.config.offload_activations is True,
        "sharded_data_parallel_degree": run.mesh.shard > 1,
        "bf16": run.config.bf16,
        "fp16": run.config.fp16,
    }
    wanted = [name for name, is_asked in asked.items() if is_asked]
    if wanted:
        raise UsageError(
            f"{', '.join(wanted)}: not available with TensorFlow in this version. Mixed precision is Keras' "
            "own (tf.keras.mixed_precision.set_global_policy); the others need PyTorch."
        )
