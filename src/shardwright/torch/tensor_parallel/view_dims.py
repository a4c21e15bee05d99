"""Follows a cut through a reshape, in pure arithmetic.

A reshape keeps the order of elements and regroups dimensions: ``(2, 6, 4) -> (2, 3, 2, 4)`` splits one,
``(2, 6, 4) -> (12, 4)`` merges two. A cut survives where each run of the merged or split dimensions is a row
of whole slices of one new dimension.
"""

from collections.abc import Sequence
from math import prod

from shardwright.placement import Cut

__all__ = ["cut_after_reshape", "matching_dims"]

# A cut inner dimension, merged into outer ones, repeats its runs. Beyond this the tensor is gathered.
_MAX_RUNS = 4096


def cut_after_reshape(shape: Sequence[int], new_shape: Sequence[int], cut: Cut) -> Cut | None:
    """How a reshaped tensor is cut if each rank reshapes its part."""
    for dims, new_dims in matching_dims(shape, new_shape):
        if cut.dim in dims:
            flat = _flattened([shape[dim] for dim in dims], dims.index(cut.dim), cut)
            found = None if flat is None else _unflattened([new_shape[dim] for dim in new_dims], flat)
            return None if found is None else found.at(new_dims[found.dim])
    return None


def matching_dims(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of old and new dimensions, in order, that hold as many elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old, new, size, new_size = [], [], 1, 1
        if i < len(shape):
            old, size, i = [i], shape[i], i + 1
        if j < len(new_shape):
            new, new_size, j = [j], new_shape[j], j + 1
        while size != new_size:
            if size < new_size:
                old, size, i = [*old, i], size * shape[i], i + 1
            else:
                new, new_size, j = [*new, j], new_size * new_shape[j], j + 1
        # A size of 1 that the other side lacks joins this group, so that later groups stay in step.
        while i < len(shape) and shape[i] == 1 and not (j < len(new_shape) and new_shape[j] == 1):
            old, i = [*old, i], i + 1
        while j < len(new_shape) and new_shape[j] == 1 and not (i < len(shape) and shape[i] == 1):
            new, j = [*new, j], j + 1
        found.append((old, new))
    return found


def _flattened(sizes: list[int], dim: int, cut: Cut) -> Cut | None:
    """The cut of several dimensions merged into one."""
    outer, inner = prod(sizes[:dim]), prod(sizes[dim + 1 :])
    if outer * len(cut.runs) > _MAX_RUNS:
        return None
    return cut.at(0).times(inner).repeated(outer)


def _unflattened(sizes: list[int], flat: Cut) -> Cut | None:
    """The cut of a dimension split into several."""
    for dim, size in enumerate(sizes):
        outer, inner = prod(sizes[:dim]), prod(sizes[dim + 1 :])
        if size == 1 and len(flat.runs) > 1:
            continue
        block = size * inner
        first = flat.slice(0, block)
        # Each outer index must see the same runs; merged neighbours (r0 r1 | r1 r0) come apart here.
        if outer > 1 and first.repeated(outer) != flat:
            continue
        found = first.over(inner)
        if found is not None:
            return found.at(dim)
    return None
