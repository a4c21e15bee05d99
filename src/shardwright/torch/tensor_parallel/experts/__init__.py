"""Experts of a model, of which each rank has some.

- `stacked`: all weights of a kind in one tensor, as in transformers 5. Tokens are gathered, or go to the
  ranks of their experts (`exchange`).
- `listed`: modules of a list, in a loop, as in transformers 4, the code of DeepSeek and Mistral, and most
  models of one's own. `routing_code` runs the code around the loop.
"""

from collections.abc import Iterable

from torch import nn

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.experts.listed import (
    cuts_of_listed_experts,
    reasons_to_stay,
    run_listed_experts,
)
from shardwright.torch.tensor_parallel.experts.stacked import cuts_of_stacked_experts, run_stacked_experts

__all__ = ["cuts_of_experts", "reasons_to_stay", "run_own_experts"]


def cuts_of_experts(model: nn.Module, *, num_ranks: int, units: Iterable[str]) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name."""
    stacked = cuts_of_stacked_experts(model, num_ranks=num_ranks)
    return stacked | cuts_of_listed_experts(model, num_ranks=num_ranks, units=units)


def run_own_experts(model: nn.Module) -> None:
    """Has experts run on the ranks that have them; whole ones run as they did."""
    run_stacked_experts(model)
    run_listed_experts(model)
