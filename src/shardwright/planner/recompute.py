"""Which units to recompute: as few seconds as possible, and only where memory requires it.

A recomputed unit keeps its inputs instead of everything that its backward needs, and runs its forward again
in the backward. That frees ``in_flight * (saved - kept)`` bytes of its rank for ``forward`` seconds a
microbatch. Ranks do not share memory, so each is solved alone: the units with the most bytes for a second
first, until it fits, then without those that turned out unnecessary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.layout import Layout
from shardwright.planner.memory import work_bytes

__all__ = ["choose_recompute"]

Floats = NDArray[np.float64]


def choose_recompute(
    layout: Layout, *, in_flight: Sequence[int], limit_bytes: int, optimizer_factor: float = 2.0
) -> Layout:
    """Recomputes what it must for every rank to fit, if that is possible; all that helps where it is not.

    Args:
        layout: where every call runs.
        in_flight: microbatches in flight, for each stage.
        limit_bytes: memory of one rank; 0 means no limit.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
    """
    if not limit_bytes:
        return layout
    chosen: list[int] = []
    stage_of_call = layout.stage_of_call
    weight = np.asarray(in_flight, dtype=float)[stage_of_call]
    plain = layout.with_recompute([])
    kept = weight * (layout.chain.saved_bytes + layout.chain.glue_bytes)
    sent = layout.sent_bytes()
    for rank, (held, trained) in enumerate(layout.parameter_bytes()):
        calls = [call for stage in layout.stages_of(rank) for call in layout.calls(stage)]
        fixed = held + trained + round(trained * optimizer_factor) + float(kept[calls].sum())
        fixed += sum(in_flight[stage] * sent[stage] for stage in layout.stages_of(rank))
        if fixed + work_bytes(plain)[rank] > limit_bytes:
            chosen += _cheapest(layout, calls, weight, room=limit_bytes - fixed)
    return layout.with_recompute(chosen)


def _cheapest(layout: Layout, calls: Sequence[int], weight: Floats, *, room: float) -> list[int]:
    """Calls of one rank whose recomputation leaves room for its work memory.

    Args:
        layout: where every call runs.
        calls: the calls of the rank.
        weight: microbatches in flight, for each call.
        room: bytes left without recomputation and work memory; negative where some are missing.
    """
    chain = layout.chain
    frees = weight * (chain.saved_bytes - chain.kept_bytes)
    seconds = chain.recompute_s
    order = sorted(
        (call for call in calls if frees[call] > 0), key=lambda call: (seconds[call] / frees[call], call)
    )

    def fits(picked: Sequence[int]) -> bool:
        inside = set(picked)
        work = max(
            chain.work_bytes[c] + (chain.saved_bytes[c] - chain.kept_bytes[c] if c in inside else 0.0)
            for c in calls
        )
        return bool(room + sum(frees[c] for c in picked) >= work)

    picked: list[int] = []
    for call in order:
        if fits(picked):
            break
        picked.append(call)
    if not fits(picked):
        return picked
    for call in sorted(picked, key=lambda c: -seconds[c]):
        rest = [c for c in picked if c != call]
        if fits(rest):
            picked = rest
    return picked
