"""Chooses the units to recompute: as few seconds as possible, only where memory requires it.

A recomputed unit keeps its inputs instead of everything that its backward needs, and repeats its forward in
the backward. That frees ``in_flight * (saved - kept)`` bytes of its rank for ``forward`` seconds per
microbatch. Ranks do not share memory, so each is solved alone: first the units with the most bytes per
second, until it fits, then without those that turn out unnecessary.
"""

from collections.abc import Sequence

from shardwright.planner.layout import Layout
from shardwright.planner.memory import messages

__all__ = ["choose_recompute"]


def choose_recompute(
    layout: Layout,
    *,
    in_flight: Sequence[int],
    limit_bytes: int,
    optimizer_factor: float = 2.0,
    batch_bytes: int = 0,
) -> Layout:
    """Recomputes what every rank needs to fit, if possible; otherwise everything that helps.

    Args:
        layout: where every call runs.
        in_flight: microbatches in flight, for each stage.
        limit_bytes: memory of one rank; 0 means no limit.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
        batch_bytes: the tensors of a batch.
    """
    if not limit_bytes:
        return layout
    chosen: list[int] = []
    sent, under_way = layout.sent_bytes(), messages(layout)
    for rank, state in enumerate(layout.state_bytes()):
        fixed = state.parameters + state.gradients + round(state.optimized * optimizer_factor)
        fixed += under_way[rank].num_bytes() + batch_bytes * (1 if rank == 0 else 2)
        fixed += sum(in_flight[stage] * sent[stage] for stage in layout.stages_of(rank))
        need = _Need(layout, rank, in_flight=in_flight, fixed=fixed)
        chosen += _cheapest(need, limit_bytes=limit_bytes)
    return layout.with_recompute(chosen)


class _Need:
    """Bytes that one rank needs, for any choice of recomputed calls.

    Args:
        layout: where every call runs.
        rank: pipeline rank.
        in_flight: microbatches in flight, for each stage.
        fixed: bytes that do not depend on the choice.
    """

    def __init__(self, layout: Layout, rank: int, *, in_flight: Sequence[int], fixed: int):
        chain = layout.chain
        self._layout = layout
        self._stages = layout.stages_of(rank)
        self._in_flight = in_flight
        self._fixed = fixed
        self.calls = [call for stage in self._stages for call in layout.calls(stage)]
        self._stage = {call: stage for stage in self._stages for call in layout.calls(stage)}
        self._saved, self._kept = chain.saved_bytes.tolist(), chain.kept_bytes.tolist()
        self._glue, self._work = chain.glue_bytes.tolist(), chain.work_bytes.tolist()
        stage_of_call = layout.stage_of_call.tolist()
        self._values = [
            (value, stage_of_call[value.source] if value.sent >= 0 else -1, stage_of_call[value.sent])
            for value in chain.saved_values
            if not self._stage.keys().isdisjoint((*value.savers, *value.glue_savers, *value.readers))
        ]

    def frees(self, call: int) -> float:
        """Bytes that the recomputation of a call gives free."""
        return float(self._in_flight[self._stage[call]] * (self._saved[call] - self._kept[call]))

    def seconds(self, call: int) -> float:
        """What it takes."""
        return float(self._layout.chain.recompute_s[call])

    def bytes(self, picked: Sequence[int]) -> float:
        """The peak of the rank when these calls are recomputed."""
        recompute = dict.fromkeys(range(self._layout.chain.num_calls), False) | dict.fromkeys(picked, True)
        work, total = 0.0, float(self._fixed)
        for stage in self._stages:
            behind = 0.0
            for call in reversed(self._layout.calls(stage)):
                again = self._saved[call] - self._kept[call] if recompute[call] else 0.0
                work = max(work, self._work[call] + again - behind)
                behind += (self._kept[call] if recompute[call] else self._saved[call]) + self._glue[call]
            total += self._in_flight[stage] * behind
        for value, home, target in self._values:
            counts: dict[int, int] = {}
            for call in value.keepers(recompute):
                if call in self._stage:
                    counts[self._stage[call]] = counts.get(self._stage[call], 0) + 1
            if home >= 0 and home != target and home in counts:
                counts[home] += 1
            total -= sum(self._in_flight[s] * (count - 1) for s, count in counts.items()) * value.num_bytes
        return total + work


def _cheapest(need: _Need, *, limit_bytes: int) -> list[int]:
    """Calls of one rank whose recomputation makes it fit; all that free memory where nothing does."""
    order = sorted(
        (call for call in need.calls if need.frees(call) > 0),
        key=lambda call: (need.seconds(call) / need.frees(call), call),
    )
    picked: list[int] = []
    for call in order:
        if need.bytes(picked) <= limit_bytes:
            break
        picked.append(call)
    if need.bytes(picked) > limit_bytes:
        return picked
    for call in sorted(picked, key=lambda c: -need.seconds(c)):
        rest = [c for c in picked if c != call]
        if need.bytes(rest) <= limit_bytes:
            picked = rest
    return picked
