"""Look-ups, scattered writes, convolutions: which dimensions and channels may be cut."""

from collections.abc import Mapping
from typing import Any

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import (
    Call,
    Candidate,
    Form,
    Input,
    Letters,
    broadcast,
    candidates_of,
    rule,
)


@rule("index_select", "index_fill")
def index_select(call: Call) -> Form | None:
    """``self[:, index]`` for one dimension, by a vector of indices."""
    one, index = call.inputs[0], call.inputs[1]
    if one.ndim == 0 or index.ndim != 1 or len(call.inputs) != 2:
        return None
    names: Letters = tuple(range(one.ndim))
    dim = call.dim()
    if call.name.startswith("index_fill"):
        terms = ((0,),) if call.get("value") == 0 else ()
        return Form((names, (None,)), (names,), uncut=frozenset([dim]), terms=terms)
    result = (*names[:dim], "index", *names[dim + 1 :])
    return Form((names, ("index",)), (result,), uncut=frozenset([dim]), terms=((0,),))


@rule("index_add", "index_copy")
def index_add(call: Call) -> Form | None:
    """Adds slices at indices of one dimension."""
    one, index, source = call.inputs
    if one.ndim == 0 or source.ndim != one.ndim or index.ndim != 1:
        return None
    names: Letters = tuple(range(one.ndim))
    dim = call.dim()
    slices: Letters = tuple("index" if each == dim else each for each in names)
    return Form(
        (names, ("index",), slices),
        (names,),
        uncut=frozenset([dim] if call.name.startswith("index_add") else [dim, "index"]),
        # Rows of the source that are cut give every rank a summand of what is added.
        sums=(frozenset(["index"]),),
        terms=((0,), (2,)),
    )


@rule("gather")
def gather(call: Call) -> Form | None:
    """Picks along one dimension; others that are as long in both may be cut."""
    one, index = call.inputs
    if one.ndim == 0:
        return None
    dim = call.dim()
    return Form(*_beside(one, index, dim), terms=((0,),))


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Form | None:
    """Puts along one dimension; others that are as long in all may be cut."""
    one, index = call.inputs[0], call.inputs[1]
    if one.ndim == 0 or call.get("reduce") is not None:
        return None
    dim = call.dim()
    (names, own), _ = _beside(one, index, dim)
    if len(call.inputs) == 2:
        terms = ((0,),) if call.get("value") == 0 else ()
        return Form((names, own), (names,), terms=terms)
    if call.inputs[2].shape != index.shape:
        return None
    return Form((names, own, own), (names,), terms=((0,), (2,)))


def _beside(one: Input, index: Input, dim: int) -> tuple[tuple[Letters, Letters], tuple[Letters]]:
    """Letters of the dimensions beside the one that is looked up; None where the sizes differ."""
    shared = tuple(
        each if each != dim and one.shape[each] == index.shape[each] else None for each in range(one.ndim)
    )
    return (shared, shared), (shared,)


@rule("index", "_unsafe_index")
def index(call: Call) -> Form | None:
    """``self[i, :, j]``: the dimensions that are not looked up may be cut, and those of the indices."""
    one = call.inputs[0]
    found = _indexed(one, call["indices"])
    if found is None:
        return None
    names, indices, result = found
    return Form((names, *indices), (result,), terms=((0,),))


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(call: Call) -> Form | None:
    """``self[i, :, j] = values``, or ``+= values``."""
    one = call.inputs[0]
    found = _indexed(one, call["indices"])
    if found is None:
        return None
    names, indices, result = found
    values = call.inputs[-1]
    shape = _size_of(result, one, call["indices"])
    if values.ndim > len(shape):
        return None
    of_indices = frozenset(each for each in result if isinstance(each, str))
    own = broadcast(values.shape, shape, result)
    if call["accumulate"]:
        # Values that are cut give every rank a summand. Stretched ones would be added by each rank.
        stretched = frozenset(letter for letter in of_indices if letter not in own)
        return Form(
            (names, *indices, own),
            (names,),
            uncut=stretched,
            sums=(of_indices,),
            terms=((0,), (len(indices) + 1,)),
        )
    return Form((names, *indices, own), (names,), uncut=of_indices, terms=((0,), (len(indices) + 1,)))


def _indexed(one: Input, indices: list[Input | None]) -> tuple[Letters, list[Letters], Letters] | None:
    """Letters of the tensor, of each index, and of the result."""
    used = [dim for dim, each in enumerate(indices) if each is not None]
    tensors = [each for each in indices if each is not None]
    if not used or any(each.dtype.itemsize == 1 for each in tensors):
        return None  # masks: how many elements come out depends on their values
    ndim = max(each.ndim for each in tensors)
    shape = [1] * ndim
    for each in tensors:
        for place, size in enumerate(each.shape):
            at = ndim - each.ndim + place
            shape[at] = size if shape[at] == 1 else shape[at]
    looked_up: Letters = tuple(f"index {place}" for place in range(ndim))
    names: Letters = tuple(None if dim in used else dim for dim in range(one.ndim))
    letters_of = [broadcast(each.shape, shape, looked_up) for each in tensors]
    rest = [dim for dim in range(one.ndim) if dim not in used]
    together = used == list(range(used[0], used[0] + len(used)))
    before = [dim for dim in rest if together and dim < used[0]]
    after = [dim for dim in rest if dim not in before]
    return names, letters_of, (*before, *looked_up, *after)


def _size_of(result: Letters, one: Input, indices: list[Input | None]) -> list[int]:
    tensors = [each for each in indices if each is not None]
    ndim = max(each.ndim for each in tensors)
    sizes = {f"index {place}": 1 for place in range(ndim)}
    for each in tensors:
        for place, size in enumerate(each.shape):
            name = f"index {ndim - each.ndim + place}"
            sizes[name] = max(sizes[name], size)
    return [
        sizes[letter] if isinstance(letter, str) else one.shape[letter]  # type: ignore[call-overload]
        for letter in result
    ]


def _spatial(one: Input) -> Letters:
    return (None,) * (one.ndim - 2)


@rule("convolution", "convolution_overrideable")
def convolution(call: Call) -> list[Candidate] | None:
    """``n`` samples, ``c`` channels in, ``o`` channels out; with groups, ``g`` of both."""
    data, weight = call.inputs[:2]
    result = call.outputs[0]
    if result is None or data.ndim < 3:
        return None
    call.flops = 2.0 * weight.numel * result.numel() / max(result.shape[1], 1)
    if call["transposed"]:
        call.flops = 2.0 * weight.numel * data.numel / max(data.shape[1], 1)
    if call["groups"] > 1:
        return _by_groups(call, data, weight, {"data": 0, "weight": 1, "bias": 2}, backward=False)
    of_weight: Letters = (("c", "o") if call["transposed"] else ("o", "c")) + _spatial(weight)
    inputs: tuple[Letters, ...] = (("n", "c", *_spatial(data)), of_weight)
    terms: tuple[tuple[int, ...], ...] = ((0, 1),)
    if len(call.inputs) == 3:
        inputs, terms = (*inputs, ("o",)), ((0, 1), (2,))
    form = Form(
        inputs,
        (("n", "o", *_spatial(data)),),
        sums=(frozenset("c"),),
        terms=terms,
        fills_all=True,
        flops=call.flops,
    )
    return candidates_of(call, form)


@rule("convolution_backward", "convolution_backward_overrideable")
def gradient_of_convolution(call: Call) -> list[Candidate] | None:
    """Gradients of weight and bias are sums over the samples, that of the data over channels out."""
    gradient, data, weight = call.inputs
    if data.ndim < 3:
        return None
    call.flops = 4.0 * weight.numel * gradient.numel / max(gradient.shape[1], 1)
    if call["groups"] > 1:
        return _by_groups(call, data, weight, {"gradient": 0, "data": 1, "weight": 2}, backward=True)
    of_weight: Letters = (("c", "o") if call["transposed"] else ("o", "c")) + _spatial(weight)
    space = _spatial(data)
    form = Form(
        (("n", "o", *space), ("n", "c", *space), of_weight),
        (("n", "c", *space), of_weight, ("o",)),
        sums=(frozenset("o"), frozenset("n"), frozenset("n")),
        terms=((0,),),
        sizes={"bias_sizes": ("o",)} if call["bias_sizes"] else {},
        fills_all=True,
    )
    return candidates_of(call, form)


def _by_groups(
    call: Call, data: Input, weight: Input, order: Mapping[str, int], *, backward: bool
) -> list[Candidate] | None:
    """Whole groups of channels, of the data, the weight and the result alike; or samples."""
    groups = call["groups"]
    per_group_in = data.shape[1] // groups
    channels_out = call.inputs[order["gradient"]].shape[1] if backward else call.outputs[0].shape[1]  # type: ignore[union-attr]
    per_group_out = channels_out // groups
    per_group_weight = weight.shape[0] // groups
    found: list[Candidate] = []
    for one in call.inputs:
        cut = one.cut
        if cut is None or not cut.reaches(call.num_ranks):
            continue
        if cut.dim == 0 and one.ndim == data.ndim and one is not weight:
            found.append(_samples(call, cut, data, weight, backward=backward))
            continue
        if one is weight and cut.dim == 0:
            of_groups = cut.over(per_group_weight)
        elif one is not weight and cut.dim == 1:
            of_groups = cut.over(per_group_in if one is data else per_group_out)
        elif one.ndim == 1:
            of_groups = cut.over(per_group_out)
        else:
            continue
        if of_groups is not None and of_groups.reaches(call.num_ranks):
            found.append(
                _whole_groups(call, of_groups.at(0), per_group_in, per_group_out, per_group_weight, backward)
            )
    return found


def _samples(call: Call, cut: Cut, data: Input, weight: Input, *, backward: bool) -> Candidate:
    inputs: list[Placement] = [
        cut if one.ndim == data.ndim and one is not weight else WHOLE for one in call.inputs
    ]
    outputs: tuple[Placement, ...] = (cut, PARTIAL_SUM, PARTIAL_SUM) if backward else (cut,)
    return Candidate(tuple(inputs), outputs, share=1 / call.num_ranks)


def _whole_groups(
    call: Call, groups: Cut, per_in: int, per_out: int, per_weight: int, backward: bool
) -> Candidate:
    data, out = groups.times(per_in).at(1), groups.times(per_out).at(1)
    weight, bias = groups.times(per_weight), groups.times(per_out)
    inputs: tuple[Placement, ...] = (out, data, weight) if backward else (data, weight, bias)
    outputs: tuple[Placement, ...] = (data, weight, bias) if backward else (out,)

    def arguments(rank: int) -> Mapping[str, Any]:
        changed: dict[str, Any] = {"groups": groups.length(rank)}
        if backward and call["bias_sizes"]:
            changed["bias_sizes"] = [bias.length(rank)]
        return changed

    return Candidate(inputs[: len(call.inputs)], outputs, arguments, share=1 / call.num_ranks)
