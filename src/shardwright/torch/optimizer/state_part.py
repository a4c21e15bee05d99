"""The part of an optimizer's state that this rank has, where ranks share it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor
from shardwright.torch.tensor_parallel.parts import placed_like

__all__ = ["keep_types", "part_of_state", "place_state", "refuse_other_part"]


def part_of_state() -> dict[str, int]:
    """This rank's part of a shared state; empty if none is shared."""
    if not is_initialized():
        return {}
    current = context()
    data, shard = current.data_rank, current.mesh.shard
    part = {"shard": data % shard, "shards": shard}
    if current.config.shard_optimizer_state:
        part |= {"replica": data // shard, "replicas": current.mesh.data // shard}
    if current.mesh.share > 1:
        part |= {"tensor": current.tensor_rank, "tensors": current.mesh.share}
    return part if shard > 1 or part.get("replicas", 1) > 1 else {}


def refuse_other_part(theirs: dict[str, int] | None) -> None:
    """Refuses a state that another rank has saved."""
    mine = part_of_state()
    if theirs and mine and theirs != mine:
        raise UsageError(
            f"rank {context().rank} loads a state of the optimizer that is another part of it ({theirs}) "
            f"than it has here ({mine}): ranks share it. Save it on every rank, for example in a file with "
            "sw.rank() in its name, and load on each rank its own."
        )


def place_state(state: Any, parameter: nn.Parameter) -> None:
    """Leaves this rank its part of the state of a parameter that ranks share from now on."""
    if isinstance(parameter, DividedTensor) and parameter in state:
        for key, value in state[parameter].items():
            if isinstance(value, Tensor):
                state[parameter][key] = placed_like(value, parameter)


def keep_types(optimizer: Optimizer, saved: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> None:
    """Gives the state the types that it was saved in: PyTorch casts it to those of the parameters."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype is not value.dtype:
                optimizer.state[parameter][key] = value.to(now.device).clone()
