"""Matrix products: the columns of one factor, the rows of the other, or the dimension between them is cut."""

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form, Letters, broadcast, candidates_of, letters
from shardwright.torch.tensor_parallel.rules.registry import rule

_PRODUCTS = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
    "addmm": "mk,kn->mn",
    "addmv": "mk,k->m",
    "baddbmm": "bmk,bkn->bmn",
    "ger": "m,n->mn",
    "outer": "m,n->mn",
    "addr": "m,n->mn",
}


@rule(*_PRODUCTS)
def products(call: Call) -> Form:
    """A product, with something added if there is a third tensor."""
    name = call.name[:-1] if call.name.endswith("_") else call.name
    (left, right), (result,) = letters(_PRODUCTS[name])
    inputs: tuple[Letters, ...] = (left, right)
    terms: tuple[tuple[int, ...], ...] = ((0, 1),)
    sizes = dict(zip(left + right, call.inputs[-2].shape + call.inputs[-1].shape, strict=True))
    if len(call.inputs) == 3:
        shape = tuple(sizes[letter] for letter in result)
        inputs, terms = (broadcast(call.inputs[0].shape, shape, result), left, right), ((0,), (1, 2))
    flops = 2.0
    for size in sizes.values():
        flops *= size
    return Form(inputs, (result,), sums=(frozenset(left) - frozenset(result),), terms=terms, flops=flops)


@rule("_grouped_mm")
def grouped_product(call: Call) -> list[Candidate] | None:
    """Products of several matrices at once, of experts: rows, columns, or the dimension between, in groups.

    Offsets say where the groups begin. ``g`` counts groups; a grouped dimension stays whole.
    """
    left, right = call.inputs[:2]
    if call.get("bias") is not None:
        return None
    text, grouped = {
        (2, 3): ("mk,gkn->mn", "mg"),
        (3, 2): ("gmk,kn->mn", "ng"),
        (2, 2): ("mk,kn->gmn", "kg"),
        (3, 3): ("gmk,gkn->gmn", ""),
    }[left.ndim, right.ndim]
    inputs, outputs = letters(text)
    offsets: tuple[Letters, ...] = () if call.get("offs") is None else ((None,),)
    flops = 2.0 * left.numel * right.shape[-1]
    form = Form(
        inputs + offsets,
        outputs,
        uncut=frozenset(grouped),
        sums=(frozenset("k") - frozenset(grouped),),
        terms=((0, 1),),
        flops=flops,
    )
    call.flops = flops
    return [each for each in candidates_of(call, form) if _is_aligned(call, each)]


def _is_aligned(call: Call, candidate: Candidate) -> bool:
    """Whether each rank's rows begin at a multiple of 16 bytes, as the kernel demands."""
    for one, placement in zip(call.inputs[:2], candidate.inputs, strict=False):
        if isinstance(placement, Cut):
            lengths = {placement.length(rank) for rank in range(call.num_ranks)}
            if any(length * one.dtype.itemsize % 16 for length in lengths) or 0 in lengths:
                return False
    return True
