"""Saves and restores a rank's random generators: PyTorch (CPU and GPU), Python and NumPy.

Ranks of one replica draw the same numbers; different replicas draw different ones. A run resumed on other
ranks takes the generators of the saved replica with the same number. A replica with no saved counterpart
derives its generators from those of a saved replica and its own number.
"""

import random
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwright.errors import CorruptCheckpointError

__all__ = ["further_generators", "generator_states", "set_generators"]


def generator_states(device: torch.device) -> dict[str, Any]:
    """State of all generators of this process."""
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        **on_device,
    }


def set_generators(states: Any, device: torch.device) -> None:
    """Has all generators go on from what `generator_states` gave."""
    try:
        torch.random.set_rng_state(states["torch"])
        random.setstate(states["python"])
        numpy.random.set_state(states["numpy"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"the checkpoint's random generators cannot be used: {error}") from error


def further_generators(states: Any, replica: int) -> None:
    """Seeds all generators for a replica that the run which saved did not have."""
    saved = states["torch"] if isinstance(states, dict) and "torch" in states else torch.empty(0)
    content = saved.numpy().tobytes() if isinstance(saved, Tensor) else b""
    seed = int.from_bytes(sha256(content + replica.to_bytes(8, "little")).digest()[:4], "little")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
