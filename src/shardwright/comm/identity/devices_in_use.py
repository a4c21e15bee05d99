"""Decides whether a rank may use the GPUs of its host."""

import os
from collections.abc import Mapping

import torch

__all__ = ["DEVICE_VARIABLE", "uses_gpus"]

DEVICE_VARIABLE = "SHARDWRIGHT_DEVICE"
"""``cpu`` keeps ranks on the CPU where there are GPUs; ``shardwright run --device cpu`` sets it."""


def uses_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks compute on GPUs: where PyTorch finds some, unless ``SHARDWRIGHT_DEVICE`` is ``cpu``.

    In CPU mode `torch.cuda.is_available` says yes to scripts: Shardwright's own code asks here.

    >>> uses_gpus({"SHARDWRIGHT_DEVICE": "cpu"})
    False
    """
    return environ.get(DEVICE_VARIABLE) != "cpu" and torch.cuda.is_available()
