"""Fused attention, every kernel: the batch or the heads are cut, or the positions.

Where positions are cut, ranks exchange parts of sequences for heads, and back; or they gather keys and
values, and attend from their own queries; or keys and values travel from rank to rank (`ring_attention`)::

    q k v: own positions ──all-to-all──► own heads ──► attention ──all-to-all──► own positions
    k v:   own positions ──all-gather──► all ──► attention of own queries
    k v:   own positions ──► next rank ──► ... ──► attention of own queries to each part in turn

Shapes: B batch, H heads of queries, G heads of keys (a divisor of H), Q and K positions, E and D sizes.
Queries ``BHQE``, keys ``BGKE``, values ``BGKD``, result ``BHQD``, mask that stretches to ``BHQK``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement, Whole
from shardwright.torch.tensor_parallel.call import Call, Candidate, Input, rule
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.rules import ring_attention

_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OF_CPU = _KERNELS[0]
# Others pad what they keep for the backward to blocks of positions.
_IN_A_RING = _KERNELS[:2]
_BATCH, _HEADS, _POSITIONS = 0, 1, 2
# Tensor arguments whose dimensions are those of the queries, and of the keys.
_LIKE_QUERIES = ("query", "grad_out", "grad_out_", "out", "logsumexp")
_LIKE_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


@rule(*_KERNELS, *(f"{name}_backward" for name in _KERNELS))
def attention(call: Call) -> list[Candidate] | None:
    """Each rank attends with its heads, for its part of the batch, or from its queries."""
    query, key = call["query"], call["key"]
    if query.ndim != 4 or call["dropout_p"] != 0:
        return None  # one generator draws the whole mask of a dropout
    groups = query.shape[_HEADS] // max(key.shape[_HEADS], 1)
    cuts: dict[Cut, None] = {}
    for name, one in call.arguments.items():
        if not isinstance(one, Input) or one.cut is None or one.cut.dim > _HEADS:
            continue
        if name in _LIKE_QUERIES or (name in _LIKE_KEYS and one.cut.dim == _BATCH):
            cuts[one.cut] = None
        elif name in _LIKE_KEYS:
            cuts[one.cut.times(groups)] = None
    batch, heads, length = query.shape[0], query.shape[1], query.shape[2]
    backward = call.name.endswith("_backward")
    call.flops = (10.0 if backward else 4.0) * batch * heads * length * key.shape[2] * query.shape[3]
    found = [_candidate(call, cut, groups) for cut in cuts if cut.reaches(call.num_ranks)]
    found += [_by_heads(call, groups), _from_own_queries(call), _in_a_ring(call)]
    return [each for each in found if each is not None]


def _positions(call: Call, names: tuple[str, ...]) -> Cut | None:
    given = (call.get(name) for name in names)
    cuts = (one.cut for one in given if isinstance(one, Input) and one.cut is not None)
    return next((cut for cut in cuts if cut.dim == _POSITIONS), None)


def _by_heads(call: Call, groups: int) -> Candidate | None:
    """Exchanges cut positions for cut heads, and the results back."""
    of_queries, of_keys = _positions(call, _LIKE_QUERIES), _positions(call, _LIKE_KEYS)
    if of_queries is None and of_keys is None:
        return None
    heads = call["query"].shape[_HEADS]
    num_ranks = call.num_ranks
    cut = Cut.even(_HEADS, heads // groups, num_ranks=num_ranks).times(groups)
    if not cut.reaches(num_ranks):
        cut = Cut.even(_HEADS, heads, num_ranks=num_ranks)
    inside = [one.inside for one in (call["query"], call["key"]) if isinstance(one.inside, Cut)]
    shared = [each for each in inside if each.dim == _HEADS]
    if shared:
        # Each rank takes its share of the heads that each rank of its inner group has.
        of_keys_inside = shared[-1] if len(shared) == 2 else None
        if of_keys_inside is None or any(run.length % num_ranks for run in of_keys_inside.runs):
            return None
        segments = [run.length for run in of_keys_inside.runs]
        cut = Cut.in_segments(_HEADS, segments, num_ranks=num_ranks).times(groups)
    inner = _candidate(call, cut, groups) if cut.reaches(num_ranks) else None
    if inner is None:
        return None
    backward = call.name.endswith("_backward")
    wanted = [of_queries, of_keys, of_keys] if backward else [of_queries] * 2
    return _with_results(call, inner, wanted)


def _with_results(call: Call, inner: Candidate, wanted: Sequence[Cut | None]) -> Candidate:
    """A candidate that exchanges its results within the operation, once for all that use them."""
    outputs = [
        placement if target is None or isinstance(placement, Whole) else target
        for placement, target in zip(inner.outputs, chain(wanted, [None] * len(inner.outputs)), strict=False)
    ]
    moves = [
        (place, tuple(meta.shape), meta.stride(), source, target)
        for place, (meta, source, target) in enumerate(zip(call.outputs, inner.outputs, outputs, strict=True))
        if meta is not None and source != target
    ]

    def compute(group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        run = inner.compute
        results = list(func(*args, **kwargs) if run is None else run(group, func, args, kwargs))
        for place, shape, strides, source, target in moves:
            results[place] = replaced(
                group, results[place], shape=shape, strides=strides, source=source, target=target
            )
        return tuple(results)

    exchange_s = sum(
        call.group.time_s(shape, call["query"].dtype.itemsize, source, target)
        for _, shape, _, source, target in moves
    )
    return replace(inner, outputs=tuple(outputs), compute=compute, exchange_s=exchange_s)


def _from_own_queries(call: Call) -> Candidate | None:
    """Attends from a rank's positions to all keys; the gradients of keys are summands."""
    cut = _positions(call, _LIKE_QUERIES)
    # Other kernels take no mask, or pad what they keep for the backward to blocks of positions.
    if cut is None or not cut.reaches(call.num_ranks) or not call.name.startswith(_OF_CPU):
        return None
    inputs: list[Placement] = []
    for name, one in call.arguments.items():
        if not isinstance(one, Input):
            continue
        if name in _LIKE_QUERIES:
            inputs.append(cut)
        elif name in _MASKS and one.ndim > 1 and one.shape[-2] != 1:
            inputs.append(cut.at(one.ndim - 2))
        else:
            inputs.append(WHOLE)
    outputs: tuple[Placement, ...] = (cut, cut)
    if call.name.endswith("_backward"):
        outputs = (cut, PARTIAL_SUM, PARTIAL_SUM)
    outputs += (WHOLE,) * (len(call.outputs) - len(outputs))

    def compute(group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        return _with_a_mask(call, cut, group, func, args, kwargs)

    # With a mask, a kernel computes what it hides, too.
    found = Candidate(
        tuple(inputs),
        outputs,
        compute=compute if call["is_causal"] else None,
        share=min(1.0, (1 + bool(call["is_causal"])) / call.num_ranks),
    )
    of_keys = _positions(call, _LIKE_KEYS)
    if of_keys is None or not call.name.endswith("_backward"):
        return found
    return _with_results(call, found, [None, of_keys, of_keys])


def _in_a_ring(call: Call) -> Candidate | None:
    """Sends keys and values around: where they are long, and where no rank can attend to all of them."""
    of_queries, of_keys = _positions(call, _LIKE_QUERIES), _positions(call, _LIKE_KEYS)
    kernel = call.name.removesuffix("_backward")
    if of_queries is None or of_keys is None or kernel not in _IN_A_RING:
        return None
    size = sum(call[name].numel * call[name].dtype.itemsize for name in _LIKE_KEYS)
    if kernel == _OF_CPU and size < ring_attention.LONG_BYTES:
        return None
    return ring_attention.ring(call, of_queries, of_keys, like_queries=_LIKE_QUERIES, like_keys=_LIKE_KEYS)


def _with_a_mask(
    call: Call, cut: Cut, group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Causal attention from own queries: a kernel would count them from the first."""
    query, num_keys = args[0], call["key"].shape[_POSITIONS]
    rows = torch.cat([torch.arange(a, b, device=query.device) for a, b in cut.intervals(group.rank)])
    hidden = torch.arange(num_keys, device=query.device) > rows[:, None]
    mask = torch.zeros(hidden.shape, dtype=call["query"].dtype, device=query.device)
    names = [argument.name for argument in func._schema.arguments]
    args[names.index("is_causal")] = False
    return func(*args, **{**kwargs, "attn_mask": mask.masked_fill_(hidden, float("-inf"))})


def _candidate(call: Call, cut: Cut, groups: int) -> Candidate | None:
    of_keys: Placement | None = cut
    first_keys = None
    if cut.dim == _HEADS and groups > 1:
        of_keys = cut.over(groups)
        if of_keys is None:
            first_keys = _used_keys(cut, groups, call.num_ranks)
            if first_keys is None:
                return None
            of_keys = WHOLE
    inputs: list[Placement] = []
    for name, one in call.arguments.items():
        if not isinstance(one, Input):
            continue
        if name in _LIKE_QUERIES:
            inputs.append(cut)
        elif name in _LIKE_KEYS:
            inputs.append(of_keys)  # type: ignore[arg-type]
        elif name in _MASKS and one.ndim == 4 and one.shape[cut.dim] != 1:
            inputs.append(cut)
        elif (
            name in _MASKS
            and one.ndim < 4
            and cut.dim >= 4 - one.ndim
            and one.shape[cut.dim - 4 + one.ndim] != 1
        ):
            inputs.append(cut.at(cut.dim - 4 + one.ndim))
        else:
            inputs.append(WHOLE)
    outputs = _outputs(call, cut, of_keys)  # type: ignore[arg-type]
    if outputs is None:
        return None

    def compute(group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        return _with_own_keys(call, group, func, args, kwargs, first_keys or [])

    return Candidate(
        tuple(inputs), outputs, compute=compute if first_keys else None, share=1 / call.num_ranks
    )


def _outputs(call: Call, cut: Cut, of_keys: Placement) -> tuple[Placement, ...] | None:
    if not call.name.endswith("_backward"):
        # Result and log-sum-exp have a batch and heads; the others are numbers of the kernel.
        return tuple(
            cut if index < 2 and meta is not None else WHOLE for index, meta in enumerate(call.outputs)
        )
    key_gradients = PARTIAL_SUM if of_keys == WHOLE else of_keys
    outputs: list[Placement] = [cut, key_gradients, key_gradients]
    for meta in call.outputs[3:]:
        if meta is not None and meta.numel():
            if meta.dim() != 4 or meta.shape[cut.dim] == 1:
                return None  # a stretched bias sums over what is cut; rare, so it runs whole
            outputs.append(cut)
        else:
            outputs.append(WHOLE)
    return tuple(outputs)


def _used_keys(cut: Cut, groups: int, num_ranks: int) -> list[tuple[int, int]] | None:
    """The heads of keys that each rank's heads of queries look at, if they look at all of them evenly."""
    found = []
    for rank in range(num_ranks):
        own = cut.intervals(rank)
        if len(own) != 1:
            return None
        a, b = own[0]
        first, last = a // groups, (b - 1) // groups + 1
        if last - first > 1 and (a % groups or b % groups):
            return None
        found.append((first, last))
    return found


def _with_own_keys(
    call: Call,
    group: TensorGroup,
    func: Any,
    args: list[Any],
    kwargs: Mapping[str, Any],
    used: list[tuple[int, int]],
) -> Any:
    """The operation on the heads of keys that this rank's queries look at; every rank has all of them."""
    first, last = used[group.rank]
    names = [argument.name for argument in func._schema.arguments]
    wholes = {name: args[names.index(name)] for name in _LIKE_KEYS}
    for name, data in wholes.items():
        args[names.index(name)] = data.narrow(_HEADS, first, last - first)
    results = func(*args, **kwargs)
    if not call.name.endswith("_backward"):
        return results
    padded = list(results)
    for place, data in ((1, wholes["key"]), (2, wholes["value"])):
        gradient: Tensor = data.new_zeros(data.shape)
        gradient.narrow(_HEADS, first, last - first).copy_(results[place])
        padded[place] = gradient
    return tuple(padded)
