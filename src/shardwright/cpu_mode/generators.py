"""Random generators: the CPU's stands for that of every CUDA device.

So a script that seeds both, saves both, or seeds only CUDA draws the same numbers in each run. There is one
sequence where a GPU would have a second.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["functions"]


def functions(num_devices: int) -> dict[str, Any]:
    """Replacements for functions of `torch.cuda` and `torch.cuda.random`."""
    generator = torch.default_generator

    def get_rng_state(device: Any = "cuda") -> Tensor:
        return generator.get_state()

    def get_rng_state_all() -> list[Tensor]:
        return [generator.get_state() for _ in range(num_devices)]

    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
        for state in list(new_states)[:1]:
            generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def seed() -> None:
        generator.seed()

    def initial_seed() -> int:
        return generator.initial_seed()

    return {
        "get_rng_state": get_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "initial_seed": initial_seed,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    }
