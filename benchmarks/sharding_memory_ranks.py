"""What each rank does in section D of `sharding.py`: trains a GPT, and says what it keeps."""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwright.torch as sw
from memory_limit import join
from sharding_ranks import GPT, VOCABULARY
from shardwright.torch.model import distributed_model
from shardwright.torch.parameters.sharded_tensor import ShardedTensor

__all__ = ["Kept", "kept_by_a_rank", "train_inside"]

# So few that activations are small beside parameters, gradients and the optimizer's state.
_TOKENS = 4
_MMAP_THRESHOLD = -3  # from malloc.h


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a rank keeps.

    Attributes:
        parameters: values; of memory that ranks share, its part.
        gradients: theirs, between backward and update.
        optimizer: its state, with float32 copies of parameters in 16 bits.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All together."""
        return self.parameters + self.gradients + self.optimizer


def kept_by_a_rank(blocks: int, settings: dict[str, Any]) -> Kept:
    """Trains a step, and counts the memory behind the tensors, that of each storage once."""
    model, optimizer, step = _prepare(blocks, settings)
    step()
    parameters = list(model.local_parameters())
    shared = [p.local for p in parameters if isinstance(p, ShardedTensor)]
    own = [p for p in parameters if not isinstance(p, ShardedTensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = model.replicas.updated_parts
    return Kept(
        parameters=_bytes_behind(own) + _bytes_behind(shared) / settings["sharded_data_parallel_degree"],
        gradients=_bytes_behind(getattr(gradient, "local", gradient) for gradient in gradients),
        optimizer=_bytes_behind(value for values in optimizer.state.values() for value in values.values())
        + (0 if parts is None else parts.num_bytes),
    )


def train_inside(folder: Path, blocks: int, settings: dict[str, Any]) -> None:
    """Trains two steps, of which the second has all states, within the limit of a control group.

    Args:
        folder: of the control group.
        blocks: of the model.
        settings: of the run; without `keeps`, all memory that is freed is given back at once.
    """
    join(folder)
    settings = dict(settings)
    if not settings.pop("keeps", False):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 * 1024)
        distributed_model.keep_freed_memory = lambda: False
    _, optimizer, step = _prepare(blocks, settings)
    for _ in range(2):
        optimizer.zero_grad()
        step()


def _prepare(blocks: int, settings: dict[str, Any]) -> tuple[Any, Any, Callable[[], None]]:
    """Model, optimizer, and what trains a step."""
    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    torch.manual_seed(0)
    with sw.delay_param_initialization():
        module = GPT(blocks)
    model = sw.DistributedModel(module)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.randint(0, VOCABULARY, (1, _TOKENS + 1))

    @sw.step
    def train(model: Any, tokens: Tensor) -> None:
        model.backward(model(tokens))

    def step() -> None:
        train(model, tokens)
        optimizer.step()

    return model, optimizer, step


def _bytes_behind(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
