"""Shapes and slices: the cut goes where its dimension goes, and a pending sum stays pending."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Candidate, Compute, Form, Input, broadcast, rule
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import cut_after_reshape, local_shape

_Arguments = Callable[[int], Mapping[str, Any]]


def _moved(
    call: Call,
    cuts: Sequence[Cut | None] | Cut | None,
    arguments: _Arguments | None = None,
    compute: Compute | None = None,
    *,
    linear: bool = True,
) -> list[Candidate]:
    """Candidates of an operation on one tensor, given how its results are cut if it is."""
    source = call.inputs[0].placement
    if source == PARTIAL_SUM:
        return [Candidate((source,), (source,) * len(call.outputs), preferred=True)] if linear else []
    if not isinstance(source, Cut):
        return []
    found: list[Placement] = []
    for cut in cuts if isinstance(cuts, list) else [cuts] * len(call.outputs):
        if cut is None:
            return []
        found.append(cut)  # type: ignore[arg-type]
    return [Candidate((source,), tuple(found), arguments, compute, share=1 / call.num_ranks)]


@rule("detach", "alias")
def same(call: Call) -> list[Candidate]:
    """The tensor itself, without history."""
    return _moved(call, call.inputs[0].cut)


@rule("view", "_unsafe_view", "_reshape_alias")
def view(call: Call) -> list[Candidate]:
    """A rank reshapes its part, if that is slices along one dimension of the new shape."""
    one, meta = call.inputs[0], call.outputs[0]
    if not isinstance(one.placement, Cut) or meta is None:
        return _moved(call, None)
    if call.get("dtype") is not None:
        # Elements of another size: the last dimension grows or shrinks.
        same_size = meta.dtype.itemsize == one.dtype.itemsize
        return _moved(call, one.cut if same_size or one.placement.dim < one.ndim - 1 else None)
    cut = cut_after_reshape(one.shape, tuple(meta.shape), one.placement) if one.numel else None
    if cut is None:
        return []
    shape = tuple(meta.shape)

    def reshaped(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        part: Tensor = args[0]
        own = local_shape(shape, cut, group.rank)
        return part.reshape(own)

    def arguments(rank: int) -> Mapping[str, Any]:
        return {"size": list(local_shape(shape, cut, rank))}

    if call.name == "_reshape_alias":  # whose strides are those of the whole
        return _moved(call, cut, compute=reshaped)
    return _moved(call, cut, arguments)


@rule("permute")
def permute(call: Call) -> list[Candidate]:
    """The cut dimension goes where it goes."""
    one = call.inputs[0]
    order = [dim % one.ndim for dim in call["dims"]] if one.ndim else []
    return _moved(call, one.cut and one.cut.at(order.index(one.cut.dim)))


@rule("transpose", "t", "swapaxes")
def transpose(call: Call) -> list[Candidate]:
    """Two dimensions change places."""
    one = call.inputs[0]
    if one.cut is None or one.ndim < 2:
        return _moved(call, one.cut)
    a, b = (0, 1) if call.name in ("t", "t_") else (call.dim("dim0"), call.dim("dim1"))
    return _moved(call, one.cut.at({a: b, b: a}.get(one.cut.dim, one.cut.dim)))


@rule("unsqueeze")
def unsqueeze(call: Call) -> list[Candidate]:
    """A new dimension comes before the cut one, or after it."""
    one = call.inputs[0]
    return _moved(call, one.cut and one.cut.at(one.cut.dim + (call.dim(ndim=one.ndim + 1) <= one.cut.dim)))


@rule("squeeze")
def squeeze(call: Call) -> list[Candidate]:
    """Dimensions of size 1 go; one that is cut (one rank has it all) must not."""
    one = call.inputs[0]
    dims = call.get("dim")
    chosen = range(one.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % one.ndim for dim in chosen if one.shape[dim % one.ndim] == 1} if one.ndim else set()
    if one.cut is None:
        return _moved(call, None)
    if one.cut.dim in gone:
        return []
    cut = one.cut.at(one.cut.dim - sum(dim < one.cut.dim for dim in gone))
    if one.cut.dim not in {dim % one.ndim for dim in chosen}:
        return _moved(call, cut)
    # A rank's part may have one slice of the cut dimension, which stays.
    kept = tuple(sorted(gone))
    return _moved(call, cut, compute=lambda group, func, args, kwargs: args[0].squeeze(kept))


@rule("expand")
def expand(call: Call) -> list[Candidate]:
    """Stretched dimensions are whole."""
    one, meta = call.inputs[0], call.outputs[0]
    if one.cut is None or meta is None:
        return _moved(call, None)
    shape, cut = tuple(meta.shape), one.cut.at(one.cut.dim + meta.dim() - one.ndim)
    if shape[cut.dim] != one.shape[one.cut.dim]:
        return []
    return _moved(call, cut, lambda rank: {"size": list(local_shape(shape, cut, rank))})


@rule("slice")
def slices(call: Call) -> list[Candidate]:
    """A slice of a cut dimension is each rank's share of it, which may be nothing."""
    one = call.inputs[0]
    if one.cut is None or one.cut.dim != call.dim():
        return _moved(call, one.cut)
    cut, step = one.cut, call["step"]
    call.group.cuts["sliced", one.shape, cut.dim] = cut
    start, stop, _ = slice(call["start"], call["end"]).indices(one.shape[cut.dim])
    stop = max(start, stop)
    if step != 1 and any(len(cut.intervals(rank)) > 1 for rank in range(call.num_ranks)):
        return []

    def arguments(rank: int) -> Mapping[str, Any]:
        first, last = cut.local_slice(rank, start, stop, step)
        return {"start": first, "end": last}

    return _moved(call, cut.slice(start, stop, step), arguments)


@rule("select")
def select(call: Call) -> list[Candidate]:
    """One slice along another dimension than the cut one."""
    one, dim = call.inputs[0], call.dim()
    if one.cut is None or one.cut.dim == dim:
        return _moved(call, None)
    return _moved(call, one.cut.at(one.cut.dim - (dim < one.cut.dim)))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
def split(call: Call) -> list[Candidate]:
    """Pieces of a cut dimension are each rank's shares of them."""
    one, dim = call.inputs[0], call.dim()
    if one.cut is None or one.cut.dim != dim:
        return _moved(call, one.cut)
    cut, cuts, start = one.cut, list[Cut | None](), 0
    for meta in call.outputs:
        size = meta.shape[dim] if meta is not None else 0
        cuts.append(cut.slice(start, start + size))
        start += size

    def pieces(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> list[Tensor]:
        part: Tensor = args[0]
        return list(part.split_with_sizes([each.length(group.rank) for each in cuts if each], dim))

    return _moved(call, cuts, compute=pieces)


@rule("unbind")
def unbind(call: Call) -> list[Candidate]:
    """All slices along another dimension than the cut one."""
    one, dim = call.inputs[0], call.dim()
    if one.cut is None or one.cut.dim == dim:
        return _moved(call, None)
    return _moved(call, one.cut.at(one.cut.dim - (dim < one.cut.dim)))


@rule("as_strided")
def as_strided(call: Call) -> list[Candidate]:
    """A partial sum lies in memory as the tensor does. A part of a cut one does not."""
    return _moved(call, None)


@rule("_conj", "_neg_view")
def lazy_bits(call: Call) -> list[Candidate]:
    """Copies: below autograd, kernels do not heed the bits that stand for a conjugate or a negative."""
    source = call.inputs[0].placement
    compute = torch.conj_physical if call.name == "_conj" else torch.neg

    def computed(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        part: Tensor = args[0]
        return compute(part)

    share = 1 / call.num_ranks if isinstance(source, Cut) else 1.0
    return [Candidate((source,), (source,), compute=computed, share=share, preferred=True, copies=True)]


@rule("view_as_real", "view_as_complex", "conj_physical", "real", "imag")
def complex_views(call: Call) -> list[Candidate]:
    """Real and imaginary parts are one more dimension, the last one."""
    one = call.inputs[0]
    last = call.name == "view_as_complex" and one.cut is not None and one.cut.dim == one.ndim - 1
    return _moved(call, None if last else one.cut)


@rule("flip")
def flip(call: Call) -> list[Candidate]:
    """Each rank flips its part, and the runs come in reverse."""
    one = call.inputs[0]
    dims = {dim % one.ndim for dim in call["dims"]} if one.ndim else set()
    return _moved(call, one.cut.reversed() if one.cut is not None and one.cut.dim in dims else one.cut)


@rule("roll", "tril", "triu", "diagonal", "unfold", "constant_pad_nd", "rot90")
def whole_dimensions(call: Call) -> list[Candidate]:
    """The dimensions concerned stay whole."""
    one, ndim = call.inputs[0], call.inputs[0].ndim
    linear = True
    match call.name.rstrip("_"):
        case "roll":
            touched = set(call["dims"]) or set(range(ndim))
        case "rot90":
            touched = set(call["dims"])
        case "tril" | "triu":
            touched = {-1, -2}
        case "diagonal":
            touched = {call["dim1"], call["dim2"]}
        case "unfold":
            touched = {call["dimension"]}
        case _:
            touched = {-1 - place // 2 for place, size in enumerate(call["pad"]) if size}
            linear = call["value"] == 0
    touched = {dim % ndim for dim in touched} if ndim else set()
    cut = one.cut
    if cut is not None and cut.dim in touched:
        return []
    if cut is not None and call.name == "diagonal":
        cut = cut.at(cut.dim - sum(dim < cut.dim for dim in touched))
    return _moved(call, cut, linear=linear)


@rule("repeat")
def repeat(call: Call) -> list[Candidate]:
    """Copies of a cut dimension repeat its runs; within a rank's part they come run by run."""
    one, times = call.inputs[0], call["repeats"]
    if one.cut is None:
        return _moved(call, None)
    offset = len(times) - one.ndim
    return _moved(call, one.cut.repeated(times[offset + one.cut.dim]).at(one.cut.dim + offset))


@rule("cat")
def cat(call: Call) -> Form | list[Candidate] | None:
    """Other dimensions may be cut; along the same dimension the cuts follow each other."""
    ndim = call.inputs[0].ndim
    if any(one.ndim != ndim for one in call.inputs):
        return None
    dim = call["dim"] % ndim
    names = tuple(None if each == dim else each for each in range(ndim))
    if not any(one.cut is not None and one.cut.dim == dim for one in call.inputs):
        return Form((names,) * len(call.inputs), (names,), terms=tuple((i,) for i in range(len(call.inputs))))
    cuts = [_cut_along(call, one, dim) for one in call.inputs]
    joined = Cut.of(dim, [run for cut in cuts for run in cut.runs])
    return [Candidate(tuple(cuts), (joined,), share=1 / call.num_ranks)]


def _cut_along(call: Call, one: Input, dim: int) -> Cut:
    if one.cut is not None and one.cut.dim == dim:
        return one.cut
    return Cut.even(dim, one.shape[dim], num_ranks=call.num_ranks)


@rule("stack")
def stack(call: Call) -> Form:
    """Other dimensions may be cut."""
    ndim = call.inputs[0].ndim
    dim = call["dim"] % (ndim + 1)
    names = tuple(range(ndim))
    result = (*names[:dim], None, *names[dim:])
    return Form((names,) * len(call.inputs), (result,), terms=tuple((i,) for i in range(len(call.inputs))))


@rule("slice_backward", "select_backward")
def gradient_of_slice(call: Call) -> list[Candidate] | None:
    """Zeros around a slice: where the sliced tensor has them, else at the slice's first and last rank."""
    one, shape = call.inputs[0], tuple(call["input_sizes"])
    dim = call["dim"] % len(shape)
    if one.cut is None:
        return _moved(call, None)
    if call.name == "select_backward":
        cut = one.cut.at(one.cut.dim + (dim <= one.cut.dim))
        return _moved(call, cut, lambda rank: {"input_sizes": list(local_shape(shape, cut, rank))})
    if one.cut.dim != dim:
        own = one.cut
        return _moved(call, own, lambda rank: {"input_sizes": list(local_shape(shape, own, rank))})
    if call["step"] != 1 or not one.cut.runs:
        return None
    start, stop, _ = slice(call["start"], call["end"]).indices(shape[dim])
    first, last = one.cut.runs[0].rank, one.cut.runs[-1].rank
    padded = Cut.of(dim, [(first, start), *one.cut.runs, (last, shape[dim] - stop)])
    sliced = call.group.cuts.get(("sliced", shape, dim))
    if sliced is not None and sliced.slice(start, stop) == one.cut:
        padded = sliced

    def arguments(rank: int) -> Mapping[str, Any]:
        begin, end = padded.local_slice(rank, start, stop)
        return {"input_sizes": list(local_shape(shape, padded, rank)), "start": begin, "end": end}

    return _moved(call, padded, arguments)


@rule("slice_scatter", "select_scatter")
def scatter_slice(call: Call) -> Form:
    """A tensor with a slice replaced; other dimensions may be cut."""
    one = call.inputs[0]
    names = tuple(range(one.ndim))
    dim = call.dim()
    source = tuple(None if each == dim else each for each in names)
    if call.name == "select_scatter":
        source = tuple(each for each in names if each != dim)
    return Form((names, source), (names,), uncut=frozenset([dim]), terms=((0,), (1,)))


@rule("broadcast_to")
def broadcast_to(call: Call) -> Form | None:
    meta = call.outputs[0]
    if meta is None:
        return None
    shape = tuple(meta.shape)
    names = tuple(range(len(shape)))
    return Form((broadcast(call.inputs[0].shape, shape),), (names,), sizes={"size": names}, terms=((0,),))
