"""How the dimensions of an operation belong together, and which placements follow.

A form names each dimension of each tensor by a letter, as `torch.einsum` does. Of ``mk,kn->mn``:

- m or n may be cut: the tensors that have the letter are cut alike, the others are whole.
- k may be cut, too. The result is a sum over k, so each rank gets a summand of it.
- The product is linear in either factor: a partial sum times a whole matrix is a partial sum.

All rules of this package are forms, or candidates by hand where an operation needs more (a softmax over a
cut dimension takes a maximum and a sum over the ranks in between).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call

__all__ = ["Candidate", "Form", "Letters", "broadcast", "candidates_of", "letters"]

Letter = Hashable
Letters = tuple[Letter | None, ...]
"""One for each dimension; None for a dimension of size 1 that is stretched."""

Compute = Callable[..., Any]
"""Called as ``compute(group, func, args, kwargs)`` with parts; may use the group's collectives."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an operation on parts.

    Attributes:
        inputs: the placement that each tensor must have.
        outputs: the placement that each result has then.
        arguments: scalars that differ for a rank's part, by name: ``arguments(rank)``.
        compute: runs in place of the operation.
        share: of the operation's work that one rank does.
        exchange_s: seconds of what `compute` exchanges, at least.
        copies: the result of a view has memory of its own (`copied_view.py`).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    arguments: Callable[[int], Mapping[str, Any]] | None = None
    compute: Compute | None = None
    share: float = 1.0
    preferred: bool = False
    exchange_s: float = 0.0
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The letters of an operation.

    Attributes:
        uncut: letters that every rank needs whole (the dimension of a softmax).
        sums: for each result the letters that it is a sum over. A cut letter that is in neither a result nor
            its sums leaves that result whole.
        terms: arguments that the results are linear in. Every term is a set of indices, linear in each of
            them; the results are the sum of all terms.
        sizes: scalar arguments that are shapes, and their letters.
        fills_all: the kernel needs at least one slice on each rank.
        flops: of the whole operation; None for those that are as fast as memory.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    uncut: frozenset[Letter] = frozenset()
    sums: tuple[frozenset[Letter], ...] = ()
    terms: tuple[tuple[int, ...], ...] = ()
    sizes: Mapping[str, Letters] = field(default_factory=dict)
    fills_all: bool = False
    flops: float | None = None


def letters(text: str) -> tuple[tuple[Letters, ...], tuple[Letters, ...]]:
    """Inputs and outputs of ``"mk,kn->mn"``."""
    left, right = text.split("->")
    return tuple(tuple(each) for each in left.split(",")), tuple(tuple(each) for each in right.split(","))


def broadcast(shape: Sequence[int], onto: Sequence[int], names: Letters | None = None) -> Letters:
    """The letters of a tensor that is stretched to a shape, from the last dimension on."""
    names = tuple(range(len(onto))) if names is None else names
    offset = len(onto) - len(shape)
    return tuple(
        names[offset + dim] if size == onto[offset + dim] else None for dim, size in enumerate(shape)
    )


def candidates_of(call: Call, form: Form) -> list[Candidate]:
    """All ways to run an operation of a form that its inputs suggest."""
    found = list(_pending(call, form))
    cuts: dict[tuple[Letter, Any], None] = {}
    for one in call.inputs:
        if one.cut is not None and (letter := form.inputs[one.index][one.cut.dim]) is not None:
            cuts[letter, one.cut.runs] = None
        elif one.pending and call.group.between is not None:
            # Its sum may go to where such tensors are cut.
            to = call.group.between.placement(one.shape)
            if isinstance(to, Cut) and (letter := form.inputs[one.index][to.dim]) is not None:
                cuts[letter, to.runs] = None
    for letter, runs in cuts:
        candidate = _cut(call, form, letter, Cut(0, runs))
        if candidate is not None:
            found.append(candidate)
    return found


def _pending(call: Call, form: Form) -> list[Candidate]:
    """Leaves a sum over the ranks pending."""
    if not form.terms or not any(call.inputs[index].pending for term in form.terms for index in term):
        return []
    placements: list[Placement] = [WHOLE] * len(call.inputs)
    for term in form.terms:
        # A whole term counts once: on one rank.
        chosen = next((index for index in term if call.inputs[index].pending), term[0])
        placements[chosen] = PARTIAL_SUM
    # A sum with other tensors may have more summands to come. Otherwise the sum over the ranks is as cheap
    # now as later, and all later uses share it.
    alone = {term[0] for term in form.terms if len(term) == 1}
    preferred = all(one.pending or not one.shape or one.index in alone for one in call.inputs)
    return [Candidate(tuple(placements), (PARTIAL_SUM,) * len(form.outputs), preferred=preferred)]


def _cut(call: Call, form: Form, letter: Letter, cut: Cut) -> Candidate | None:
    """Cuts the dimensions of one letter."""
    if letter in form.uncut or (form.fills_all and not cut.reaches(call.num_ranks)):
        return None
    inputs: list[Placement] = []
    for own in form.inputs:
        if own.count(letter) > 1:
            return None
        inputs.append(cut.at(own.index(letter)) if letter in own else WHOLE)
    outputs: list[Placement] = []
    for index, own in enumerate(form.outputs):
        if own.count(letter) > 1:
            return None
        if letter in own:
            outputs.append(cut.at(own.index(letter)))
        elif form.sums and letter in form.sums[index]:
            outputs.append(PARTIAL_SUM)
        else:
            outputs.append(WHOLE)
    if PARTIAL_SUM in outputs:
        for term in form.terms:
            # A term that does not run over the letter would be added by every rank.
            if not any(letter in form.inputs[index] for index in term):
                inputs[term[0]] = PARTIAL_SUM
    own_sizes = {name: own.index(letter) for name, own in form.sizes.items() if letter in own}

    def arguments(rank: int) -> Mapping[str, Any]:
        changed = {}
        for name, dim in own_sizes.items():
            changed[name] = [*call[name]]
            changed[name][dim] = cut.length(rank)
        return changed

    return Candidate(
        tuple(inputs),
        tuple(outputs),
        arguments=arguments if own_sizes else None,
        share=1 / call.num_ranks,
    )
