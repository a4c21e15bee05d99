"""Which modules are placed whole."""

import pytest
from torch import nn

from shardwright.torch.units.unit_choice import ModuleCost, choose_units


def blocks(number: int, *, flops_each: int) -> tuple[nn.Module, dict[str, ModuleCost]]:
    """Blocks of two layers, which do all of the work."""
    model = nn.Sequential(*(Block() for _ in range(number)))
    costs = {"": ModuleCost(calls=1, flops=number * flops_each)}
    for index in range(number):
        costs[f"{index}"] = ModuleCost(calls=1, flops=flops_each)
        for layer in ("up", "down"):
            costs[f"{index}.{layer}"] = ModuleCost(calls=1, flops=flops_each // 2)
    return model, costs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("number", "flops_each", "device", "is_whole"),
    [
        (4, 10**6, "cpu", True),
        (3, 10**6, "cpu", False),  # too few for the stages
        (4, 10**9, "cpu", False),  # their halves can balance something
        (4, 10**9, "cuda", True),
        (4, 10**12, "cuda", False),
        (8, 10**12, "cuda", True),
    ],
)
def test_blocks_with_little_work_stay_whole(
    number: int, flops_each: int, device: str, is_whole: bool
) -> None:
    """Each piece of one costs the host as much as its work takes."""
    model, costs = blocks(number, flops_each=flops_each)
    names = choose_units(model, costs, num_stages=4, device=device)
    layers = [f"{index}.{layer}" for index in range(number) for layer in ("up", "down")]
    assert names == ([str(index) for index in range(number)] if is_whole else layers)
