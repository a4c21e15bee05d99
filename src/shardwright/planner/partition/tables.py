"""Sums over all intervals of a chain at once, as numpy tables.

``table[i, j]`` belongs to the stage with atoms i, i+1, ..., j-1; entries with j <= i mean nothing. Additive
costs need only prefix sums. Costs that count distinct things (a value read by two units of a stage is
received once) are written as rectangles and integrated once::

            j                 a value made by atom a and read by atoms c and d
        i ┌───────────────    is received by stage (i, j] if
     a+1  │    ┌──────────      a < i <= c < j     its first reader in the stage is c
     ...  │    │ c < j        or c < i <= d < j    its first reader in the stage is d
      c   │    └──────────
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.chain.chain import Chain

__all__ = ["Tables", "build_tables"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Costs of every possible stage of a chain, for one microbatch.

    Attributes:
        num_atoms: n; each table has n + 1 rows and columns.
        compute_s: seconds of the forward and the backward, recomputation not counted.
        recompute_s: seconds of recomputing all its calls.
        saved_bytes: bytes kept for the backward, with the values that it sends: backward starts from them.
        recomputable_bytes: the part of them that recomputation sets free.
        leaving_bytes: the part of them that units can offload.
        window_bytes: what the unit that offloads most keeps.
        work_bytes: temporary memory of its largest unit.
        recomputed_bytes: memory that its largest unit needs while it is recomputed.
        parameter_bytes: its parameters and buffers, each once.
        gradient_bytes: gradients of the trained ones.
        optimized_bytes: those that an optimizer keeps state for.
        send_bytes: values that it sends, each once however many stages read it.
        receive_gradient_bytes: gradients of what it sent.
        send_gradient_bytes: gradients of what it received.
    """

    num_atoms: int
    compute_s: Floats
    recompute_s: Floats
    saved_bytes: Floats
    recomputable_bytes: Floats
    leaving_bytes: Floats
    window_bytes: Floats
    work_bytes: Floats
    recomputed_bytes: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    optimized_bytes: Floats
    receive_bytes: Floats
    send_bytes: Floats
    receive_gradient_bytes: Floats
    send_gradient_bytes: Floats


def build_tables(chain: Chain) -> Tables:
    """The tables of a chain; for 1000 atoms about a quarter of a second."""
    n = chain.num_atoms
    starts = np.asarray(chain.starts)
    atom = chain.atom_of_call

    def sums(per_call: Floats) -> Floats:
        prefix = np.concatenate(([0.0], np.cumsum(per_call)))[starts]
        table: Floats = np.subtract.outer(-prefix, -prefix)
        return table

    recomputable = chain.column("saved_bytes") - chain.column("kept_bytes")
    parameters = []
    for use in chain.parameters:
        atoms = _atoms(atom, use.calls)
        parameters.append(([-1, *atoms], use.state(may_be_shared=len(atoms) == 1)))
    sources = [int(atom[flow.source]) for flow in chain.flows]
    forward = [
        ([source, *_atoms(atom, flow.targets, after=source)], float(flow.num_bytes))
        for source, flow in zip(sources, chain.flows, strict=True)
    ]
    gradients = [
        ([source, *_atoms(atom, flow.gradient_targets, after=source)], float(flow.gradient_bytes))
        for source, flow in zip(sources, chain.flows, strict=True)
    ]
    sent_with_gradient = _leaving(n, gradients)
    return Tables(
        num_atoms=n,
        compute_s=sums(chain.column("forward_s")) + sums(chain.column("backward_s")),
        recompute_s=sums(chain.column("recompute_s")),
        saved_bytes=sums(chain.column("saved_bytes") + chain.column("glue_bytes")) + sent_with_gradient,
        recomputable_bytes=sums(recomputable),
        leaving_bytes=sums(chain.column("saved_bytes")),
        window_bytes=_maxima(chain.column("saved_bytes"), starts),
        work_bytes=_maxima(chain.column("work_bytes"), starts),
        recomputed_bytes=_maxima(recomputable + chain.column("work_bytes"), starts),
        parameter_bytes=_entering(n, [(at, float(state.parameters)) for at, state in parameters])
        + np.minimum(
            _entering(n, [(at, float(state.gathered)) for at, state in parameters]), chain.most_gathered
        ),
        gradient_bytes=_entering(n, [(at, float(state.gradients)) for at, state in parameters]),
        optimized_bytes=_entering(n, [(at, float(state.optimized)) for at, state in parameters]),
        receive_bytes=_entering(n, forward),
        send_bytes=_leaving(n, forward),
        receive_gradient_bytes=sent_with_gradient,
        send_gradient_bytes=_entering(n, gradients),
    )


def _atoms(atom: NDArray[np.int64], calls: Sequence[int], after: int = -1) -> list[int]:
    return [a for a in dict.fromkeys(int(atom[call]) for call in calls) if a > after]


def _entering(n: int, rows: Sequence[tuple[list[int], float]]) -> Floats:
    """For each interval, the bytes of what is made before it and read inside."""
    corners: list[tuple[int, int, float]] = []
    for at, size in rows:
        for before, reader in pairwise(at):
            corners += [(before + 1, reader + 1, size), (reader + 1, reader + 1, -size)]
    return _integrate(n, corners)


def _leaving(n: int, rows: Sequence[tuple[list[int], float]]) -> Floats:
    """For each interval, the bytes of what is made inside and read after it."""
    corners: list[tuple[int, int, float]] = []
    for at, size in rows:
        source, last = at[0], at[-1]
        if last > source:
            corners += [(0, source + 1, size), (source + 1, source + 1, -size)]
            corners += [(0, last + 1, -size), (source + 1, last + 1, size)]
    return _integrate(n, corners)


def _integrate(n: int, corners: Sequence[tuple[int, int, float]]) -> Floats:
    table = np.zeros((n + 2, n + 2))
    if corners:
        rows, columns, sizes = (np.array(column) for column in zip(*corners, strict=True))
        np.add.at(table, (rows.astype(np.int64), columns.astype(np.int64)), sizes)
        np.cumsum(table, axis=0, out=table)
        np.cumsum(table, axis=1, out=table)
    return table[: n + 1, : n + 1]


def _maxima(per_call: Floats, starts: NDArray[np.int64]) -> Floats:
    per_atom = np.maximum.reduceat(per_call, starts[:-1])
    n = len(per_atom)
    table = np.zeros((n + 1, n + 1))
    table[:n, 1:] = np.triu(np.broadcast_to(per_atom, (n, n)))
    np.maximum.accumulate(table, axis=1, out=table)
    return table
