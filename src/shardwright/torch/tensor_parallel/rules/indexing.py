"""Look-ups and scattered writes: dimensions that are not looked up may be cut."""

from shardwright.torch.tensor_parallel.call import Call, Form, Input, Letters, broadcast, rule


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
