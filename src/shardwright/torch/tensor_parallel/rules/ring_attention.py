"""Attention in a ring: each rank keeps its queries, and keys and values travel around.

::

    step   rank 0   rank 1   rank 2       keys and values at hand: those of rank ...
    0      0        1        2            its own, causal within
    1      2        0        1            of an earlier rank: all positions; of a later one: none
    2      1        2        0

No rank ever has all keys. Each block of keys gives a result and the logarithm of the sum of its exponentials;
those of two blocks are put together by

    lse = log(exp(lse_a) + exp(lse_b)),    result = exp(lse_a - lse) result_a + exp(lse_b - lse) result_b

(Liu et al. 2023, arXiv:2310.01889). In the backward, kernels take the total `lse` and the total result, so
that each block gives its own summand of every gradient. Those of keys and values go straight to the rank that
has the block.

Shapes: B batch, H heads, Q own positions, E and D sizes. Queries ``BHQE``, results ``BHQD``, `lse` ``BHQ``.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Candidate, Input
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.placing import cut_alike, cut_inside, part_like
from shardwright.torch.tensor_parallel.redistribution import all_to_all
from shardwright.torch.tensor_parallel.spec import Transfer, local_shape

LONG_BYTES = 8 * 2**20
"""Of all keys and values: from there on, ranks do not gather them where a ring will do."""

_POSITIONS = 2


def ring(
    call: Call, of_queries: Cut, of_keys: Cut, *, like_queries: Sequence[str], like_keys: Sequence[str]
) -> Candidate | None:
    """Attention in a ring, forward or backward; None where it cannot be."""
    causal, num_ranks = bool(call["is_causal"]), call.num_ranks
    if call.get("attn_mask") is not None or not (
        of_queries.reaches(num_ranks) and of_keys.reaches(num_ranks)
    ):
        return None
    in_order = [run.rank for run in of_keys.runs] == list(range(num_ranks))
    if causal and (of_queries != of_keys or not in_order):
        return None
    inputs: list[Placement] = [
        of_queries if name in like_queries else of_keys if name in like_keys else WHOLE
        for name, one in call.arguments.items()
        if isinstance(one, Input)
    ]
    backward = call.name.endswith("_backward")
    first: tuple[Placement, ...] = (of_queries, of_keys, of_keys) if backward else (of_queries, of_queries)
    outputs = first + (WHOLE,) * (len(call.outputs) - len(first))
    block = max(of_keys.length(rank) for rank in range(num_ranks)) / of_keys.size
    block_bytes = block * sum(call[name].numel * call[name].dtype.itemsize for name in like_keys)
    prices = call.group.prices
    step_s = (1 + backward) * (prices.latency_s + block_bytes / prices.bandwidth_Bps)
    run = _backward if backward else _forward

    def compute(group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        return run(_Kernel(func, args, kwargs, causal=causal), of_keys, group)

    return Candidate(
        tuple(inputs),
        outputs,
        compute=compute,
        # The last rank attends to all blocks, of which the first has one.
        share=(2 * num_ranks - 1) / num_ranks**2 if causal else 1 / num_ranks,
        preferred=True,
        exchange_s=(num_ranks - 1) * step_s,
    )


class _Kernel:
    """A kernel with this rank's arguments, for any block of keys."""

    def __init__(self, func: Any, args: list[Any], kwargs: Mapping[str, Any], *, causal: bool):
        args = [_with_all_positions(each) for each in args]
        self._func, self._args, self._kwargs, self._causal = func, args, kwargs, causal
        self._places = {argument.name: place for place, argument in enumerate(func._schema.arguments)}

    @property
    def block(self) -> list[Tensor]:
        """This rank's own keys and values."""
        return [self._args[self._places[name]] for name in ("key", "value")]

    def sees(self, owner: int, rank: int) -> bool:
        """Whether queries of a rank look at the keys of another one."""
        return owner <= rank or not self._causal

    def __call__(self, block: Sequence[Tensor], *, own: bool) -> list[Any]:
        """The results for a block; causal within the rank's own."""
        args, kwargs = list(self._args), dict(self._kwargs)
        changed = {"key": block[0], "value": block[1], "is_causal": self._causal and own}
        changed |= {"max_k": block[0].shape[_POSITIONS]} if "max_k" in self._places else {}
        for name, value in changed.items():
            if self._places[name] < len(args):
                args[self._places[name]] = value
            else:
                kwargs[name] = value
        return list(self._func(*args, **kwargs))


def _forward(kernel: _Kernel, cut: Cut, group: TensorGroup) -> tuple[Any, ...]:
    results: list[Any] = []
    for owner, block in _travelling(kernel.block, cut, group):
        if not kernel.sees(owner, group.rank):
            continue
        found = kernel(block, own=owner == group.rank)
        if not results:
            dtype, results = found[0].dtype, found
            continue
        lse = torch.logaddexp(results[1], found[1])
        terms = (one[0].to(lse.dtype) * (one[1] - lse).exp().unsqueeze(-1) for one in (results, found))
        results[0], results[1] = sum(terms), lse
    results[0] = results[0].to(dtype)
    return tuple(results)


def _backward(kernel: _Kernel, cut: Cut, group: TensorGroup) -> tuple[Any, ...]:
    rank, num_ranks = group.rank, group.num_ranks
    own = kernel.block
    total = kernel(own, own=True)
    for step, (owner, block) in enumerate(_travelling(own, cut, group)):
        if not step:
            continue
        if kernel.sees(owner, rank):
            of_queries, *of_block = kernel(block, own=False)[:3]
            total[0] = total[0] + of_queries
        else:
            of_block = [torch.zeros_like(each) for each in block]
        # Somebody else has computed with this rank's block meanwhile.
        asker = (rank + step) % num_ranks
        summands = _exchanged(group, of_block, own, to=owner, source=asker)
        total[1:3] = [one + other for one, other in zip(total[1:3], summands, strict=True)]
    return tuple(total)


def _travelling(block: list[Tensor], cut: Cut, group: TensorGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """The blocks of all ranks, this rank's own first, each with its rank."""
    rank, num_ranks = group.rank, group.num_ranks
    wholes = [(*each.shape[:_POSITIONS], cut.size, *each.shape[_POSITIONS + 1 :]) for each in block]
    yield rank, block
    for step in range(1, num_ranks):
        owner = (rank - step) % num_ranks
        shapes = [local_shape(shape, cut, owner) for shape in wholes]
        neighbours = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        block = _exchanged(group, block, block, to=neighbours[0], source=neighbours[1], shapes=shapes)
        yield owner, block


def _exchanged(
    group: TensorGroup,
    sent: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    to: int,
    source: int,
    shapes: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Sends tensors of one type to a rank, and receives some from another."""
    shapes = [each.shape for each in like] if shapes is None else shapes
    specs = [cut_inside(each) for each in like]
    parts = [part_like(each, spec) for each, spec in zip(sent, specs, strict=True)]
    own_shapes = [
        tuple(shape) if spec is None else local_shape(tuple(shape), spec.placement, spec.group.rank)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    sizes = [prod(shape) for shape in own_shapes]
    pieces = [parts if rank == to else [] for rank in range(group.num_ranks)]
    counts = [sum(sizes) if rank == source else 0 for rank in range(group.num_ranks)]
    group.traffic.count(Transfer("all_to_all", sum(each.numel() for each in parts)), parts[0].element_size())
    received = torch.split(all_to_all(group, pieces, counts, parts[0])[source], sizes)
    found = [part.view(shape) for part, shape in zip(received, own_shapes, strict=True)]
    return [
        part if spec is None else cut_alike(part, spec, shape)
        for part, spec, shape in zip(found, specs, shapes, strict=True)
    ]


def _with_all_positions(argument: Any) -> Any:
    """An argument of which an inner group does not cut the positions: blocks of them travel."""
    spec = cut_inside(argument) if isinstance(argument, Tensor) else None
    return whole(argument) if spec is not None and spec.placement.dim == _POSITIONS else argument  # type: ignore[union-attr]
