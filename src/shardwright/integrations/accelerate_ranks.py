"""Has Accelerate count the ranks that Shardwright trains on."""

import os

import torch
from accelerate.state import PartialState

import shardwright.torch as sw
from shardwright.errors import UsageError

__all__ = ["count_ranks_on_cpus", "refuse_other_ranks"]

_ON_CPUS = "ACCELERATE_USE_CPU"


def count_ranks_on_cpus() -> None:
    """Sets the variable of ``accelerate launch --cpu``; without it Accelerate sees one process on CPUs.

    Called when an integration is imported: `transformers.TrainingArguments` counts ranks before any object of
    ours is.
    """
    on_cpus = not torch.cuda.is_available() or os.environ.get("SHARDWRIGHT_DEVICE") == "cpu"
    if "RANK" in os.environ and on_cpus:
        os.environ.setdefault(_ON_CPUS, "true")


def refuse_other_ranks() -> None:
    """Refuses a run in which Accelerate counts other ranks: each would write files, and print."""
    counted = PartialState().num_processes
    if counted != sw.size():
        raise UsageError(
            f"Accelerate counts {counted} processes, but the run has {sw.size()} ranks. Import the Trainer "
            "or Accelerator of shardwright.integrations before TrainingArguments are made; on CPUs, "
            f"{_ON_CPUS}=true in the environment does the same."
        )
