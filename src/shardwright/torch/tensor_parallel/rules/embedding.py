"""Look-ups in a table: its columns are cut, or its rows (the vocabulary), or the indices."""

from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut
from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form, candidates_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__ = ["own_rows"]


def own_rows(index: Tensor, cut: Cut, rank: int) -> tuple[Tensor, Tensor]:
    """Where the rows with these numbers are in a rank's part of them."""
    rows = torch.zeros_like(index)
    is_own = torch.zeros_like(index, dtype=torch.bool)
    start = 0
    for a, b in cut.intervals(rank):
        inside = (index >= a) & (index < b)
        rows = torch.where(inside, index - a + start, rows)
        is_own |= inside
        start += b - a
    return rows, is_own


@rule("embedding")
def embedding(call: Call) -> list[Candidate]:
    """A rank with some rows looks those up, and has zeros for the rest: a summand of the result."""
    table, index = call.inputs
    places = tuple(range(index.ndim))
    form = Form((("v", "d"), places), ((*places, "d"),), uncut=frozenset("v"), terms=((0,),))
    found = candidates_of(call, form)
    if table.cut is not None and table.cut.dim == 0:
        cut = table.cut
        call.group.cuts["table", table.shape[0]] = cut

        def look_up(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
            rows, is_own = own_rows(args[1], cut, group.rank)
            if not cut.length(group.rank):
                return args[0].new_zeros(*rows.shape, args[0].shape[1])  # type: ignore[no-any-return]
            return func(args[0], rows) * is_own[..., None]  # type: ignore[no-any-return]

        found.append(Candidate((cut, WHOLE), (PARTIAL_SUM,), compute=look_up))
    return found


@rule("embedding_dense_backward")
def gradient_of_table(call: Call) -> list[Candidate] | None:
    """Every rank makes the gradient of its own rows, if the ranks shared those of the table."""
    index = call.inputs[1]
    if call["scale_grad_by_freq"]:
        return None
    places = tuple(range(index.ndim))
    form = Form(((*places, "d"), places), (("v", "d"),), sums=(frozenset(places),), terms=((0,),))
    found = candidates_of(call, form)
    cut = call.group.cuts.get(("table", call["num_weights"]))
    if cut is not None:
        padding = call["padding_idx"]

        def of_own_rows(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
            values: Tensor = args[0]
            wanted: Tensor = args[1]
            rows, is_own = own_rows(wanted, cut, group.rank)
            is_own = is_own & (wanted != padding)
            table: Tensor = values.new_zeros(cut.length(group.rank), values.shape[-1])
            if len(table):
                # How many rows are own ones depends on values, which a dry run has none of.
                own = torch.where(is_own[..., None], values, torch.zeros_like(values))
                table.index_add_(0, rows.reshape(-1), own.reshape(-1, values.shape[-1]))
            return table

        found.append(Candidate((WHOLE, WHOLE), (cut,), compute=of_own_rows, share=1 / call.num_ranks))
    return found
