"""Chooses what units keep for their backward: everything, their inputs, or nothing, where memory requires it.

A recomputed unit keeps its inputs instead of everything that its backward needs, and repeats its forward in
the backward. That frees ``in_flight * (saved - kept)`` bytes of its rank for ``forward`` seconds per
microbatch. A unit that is offloaded keeps nothing, but for the few that are on their way; its bytes go to the
tier and back. As long as the copies of a rank take no longer than its computing, they cost no more than the
cores that make them; then the rank waits for them::

    seconds    recomputation              ╱     the units that are cheapest to repeat come first
                                      ╱╱╱
                                 ╱╱╱╱
               ─────────────────┘               offload: hidden behind computing, then by the bandwidth
               bytes that are freed ────────▶

Ranks do not share memory, so each is solved alone: in several orders, of which the cheapest wins that fits.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from shardwright.cluster import Link
from shardwright.costs.calibration import OFFLOADED_CALL_S
from shardwright.planner.chain import SavedValue
from shardwright.planner.layout import Layout
from shardwright.planner.objective import Demands
from shardwright.planner.rank_memory import gradients_come_late, messages

_Way = Literal["recompute", "offload"]
_Move = tuple[int, _Way]


def choose_keeping(
    layout: Layout,
    demands: Demands,
    *,
    in_flight: Sequence[int],
    host: Link | None = None,
    num_microbatches: int | None = None,
    batch_bytes: int = 0,
) -> Layout:
    """Has units keep less until every rank fits, if possible; otherwise does everything that helps.

    `host`: the way to the tier; None where copies take no time.
    """
    if not demands.limit_bytes or "auto" not in (demands.recompute, demands.offload):
        return layout
    recomputed, offloaded = set[int](), set[int]()
    sent, under_way = layout.sent_bytes(), messages(layout)
    for rank, state in enumerate(layout.state_bytes()):
        fixed = state.parameters + state.gradients + round(state.optimized * demands.optimizer_factor)
        fixed += under_way[rank].num_bytes() + batch_bytes * (1 if rank == 0 else 2)
        fixed += sum(in_flight[stage] * sent[stage] for stage in layout.stages_of(rank))
        late = gradients_come_late(layout, rank, in_flight, num_microbatches=num_microbatches)
        need = _Need(layout, rank, in_flight=in_flight, fixed=fixed, host=host, gradients_late=late)
        choice = _cheapest(need, demands)
        recomputed |= choice.recompute
        offloaded |= choice.offload
    layout = layout.with_recompute(sorted(recomputed))
    return layout.with_offload(sorted(offloaded)) if offloaded else layout


class _Choice(NamedTuple):
    """Calls of one rank that keep less."""

    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()

    def with_moves(self, moves: Sequence[_Move]) -> "_Choice":
        again, away = (frozenset(call for call, way in moves if way == w) for w in ("recompute", "offload"))
        return _Choice(self.recompute | again, self.offload | away)


class _Need:
    """Bytes and seconds of one rank, for any choice."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        in_flight: Sequence[int],
        fixed: int,
        host: Link | None,
        gradients_late: bool = False,
    ):
        chain = layout.chain
        self._layout = layout
        self._stages = layout.stages_of(rank)
        self._in_flight = in_flight
        self._fixed = fixed
        self.calls = [call for stage in self._stages for call in layout.calls(stage)]
        self._stage = {call: stage for stage in self._stages for call in layout.calls(stage)}
        self._saved, self._kept = chain.column("saved_bytes").tolist(), chain.column("kept_bytes").tolist()
        self._glue = chain.column("glue_bytes").tolist()
        self._work = (chain.column("work_bytes") + layout.reduced_gradients()).tolist()
        self._again_s = chain.column("recompute_s").tolist()
        compute_s = chain.column("forward_s") + chain.column("backward_s")
        self._compute_s = float(sum(compute_s[self.calls]))
        self.byte_s = 0.0 if host is None else 2 / host.bandwidth_Bps
        self.occupancy = 0.0 if host is None else host.occupancy
        stage_of_call = layout.stage_of_call.tolist()
        self._values = [
            (value, stage_of_call[value.source], stage_of_call[value.sent] if value.sent >= 0 else -1)
            for value in chain.saved_values
            if not self._stage.keys().isdisjoint((*value.savers, *value.glue_savers, *value.takers))
        ]
        came = layout.first_gradients().tolist() if gradients_late else [0] * chain.num_calls
        self._gradients = {call: came[call] for call in self.calls}
        self._late_bytes = sum(self._gradients.values())
        away = layout.offload
        self.given = _Choice(
            frozenset(call for call in self.calls if layout.recompute[call]),
            frozenset(call for call in self.calls if away is not None and away[call]),
        )

    def frees(self, call: int) -> float:
        """Bytes that the recomputation of a call gives free."""
        return float(self._in_flight[self._stage[call]] * (self._saved[call] - self._kept[call]))

    def recompute_s(self, call: int) -> float:
        return float(self._again_s[call])

    def move_s(self, move: _Move) -> float:
        """Seconds of recomputation, or of copies."""
        call, way = move
        return self.recompute_s(call) if way == "recompute" else self.byte_s * self.moved(call)

    def moved(self, call: int) -> float:
        """Bytes that it keeps of each microbatch, all of which may leave."""
        return float(self._saved[call])

    def recompute_price(self, call: int) -> float:
        """Seconds of recomputation for each byte that it frees of a microbatch."""
        freed = self._saved[call] - self._kept[call]
        return float(self._again_s[call] / freed) if freed > 0 else float("inf")

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a microbatch that go to the tier and back while the rank computes."""
        return self._compute_s / self.byte_s if self.byte_s else float("inf")

    def seconds(self, choice: _Choice) -> float:
        """Seconds by which a microbatch takes longer."""
        again_s: float = sum(self._again_s[call] for call in choice.recompute)
        moved = sum(
            self._kept[call] if call in choice.recompute else self._saved[call] for call in choice.offload
        )
        copies_s: float = self.byte_s * moved
        handling_s = 2 * OFFLOADED_CALL_S * len(choice.offload - choice.recompute)
        return (
            again_s + max(0.0, copies_s - self._compute_s - again_s) + self.occupancy * copies_s + handling_s
        )

    def bytes(self, choice: _Choice) -> float:
        recompute: Mapping[int, bool] = dict.fromkeys(
            range(self._layout.chain.num_calls), False
        ) | dict.fromkeys(choice.recompute, True)
        work, first, total, window, tail = 0.0, 0.0, 0.0, 0.0, 0.0
        for stage in self._stages:
            behind, came, leaving = 0.0, 0.0, []
            for call in reversed(self._layout.calls(stage)):
                again = self._saved[call] - self._kept[call] if recompute[call] else 0.0
                work = max(work, self._work[call] + again - behind)
                first = max(first, self._work[call] + again - behind + came)
                came += self._gradients[call]
                own = self._kept[call] if recompute[call] else self._saved[call]
                behind += self._glue[call]
                if call in choice.offload:
                    leaving += [own] if own else []  # a unit without bytes keeps none of others away
                else:
                    behind += own
            total += self._in_flight[stage] * behind
            most = self._layout.horizon + 1
            window = max([window, *(sum(leaving[i : i + most]) for i in range(len(leaving)))])
            tail = max(tail, sum(leaving[: most - 1]))
        for value, home, target in self._values:
            total -= self._counted_twice(value, recompute, choice, home, target) * value.num_bytes
        # Of stages with several microbatches, another one's last units are on their way.
        flying = max((self._in_flight[stage] for stage in self._stages), default=1)
        if self._late_bytes:  # of one stage: the next backward begins when the first has freed a microbatch
            work = max(first - self._late_bytes, (work if flying > 1 else 0.0) - total / flying)
        return self._fixed + total + work + window + (tail if flying > 1 else 0.0)

    def _counted_twice(
        self, value: SavedValue, recompute: Mapping[int, bool], choice: _Choice, home: int, target: int
    ) -> int:
        """How often, over microbatches, a value was counted too much; negative: it stays, and was not."""
        kept: dict[int, int] = {}
        left: set[int] = set()
        for call in value.keepers(recompute):
            if call not in self._stage:
                continue
            if call in choice.offload and (call in value.savers or call in choice.recompute):
                left.add(self._stage[call])
            else:
                kept[self._stage[call]] = kept.get(self._stage[call], 0) + 1
        is_sent = target >= 0 and home != target
        if is_sent and (home in kept or home in left):
            kept[home] = kept.get(home, 0) + 1
        for stage in left - kept.keys():
            if stage != home:  # it came from another stage, and stays
                kept[stage] = 0
        if home not in self._stages:  # of another rank: it has been received
            for call in value.takers:
                if call in self._stage:
                    kept.setdefault(self._stage[call], 0)
        return sum(self._in_flight[stage] * (count - 1) for stage, count in kept.items())


def _cheapest(need: _Need, demands: Demands) -> _Choice:
    """What makes a rank fit for the fewest seconds; what helps most where nothing does."""
    limit_bytes = demands.limit_bytes
    if need.bytes(need.given) <= limit_bytes:
        return need.given
    again = sorted(
        (call for call in need.calls if need.frees(call) > 0 and call not in need.given.recompute),
        key=lambda call: (need.recompute_s(call) / need.frees(call), call),
    )
    orders: list[list[_Move]] = []
    if demands.recompute == "auto":
        orders.append([(call, "recompute") for call in again])
    if demands.offload == "auto":
        orders.append([(call, "offload") for call in need.calls])
        if demands.recompute == "auto":
            orders.append(_mixed(need, again))
    choices = [_shortest(need, moves, limit_bytes=limit_bytes) for moves in orders]
    fitting = [choice for choice in choices if need.bytes(choice) <= limit_bytes]
    if fitting:
        return min(fitting, key=need.seconds)
    return min(choices, key=need.bytes)


def _mixed(need: _Need, again: Sequence[int]) -> list[_Move]:
    """Both ways, by their price for a byte."""
    exposed_price = need.byte_s * (1 + need.occupancy)
    hidden_price = need.byte_s * need.occupancy
    cheap = [call for call in again if need.recompute_price(call) < hidden_price]
    moves: list[_Move] = [(call, "recompute") for call in cheap]
    rest = sorted(
        (call for call in need.calls if call not in set(cheap)),
        key=lambda call: (-need.recompute_price(call), call),
    )
    room, dear = need.hidden_bytes, []
    for call in rest:
        if need.moved(call) <= room:
            room -= need.moved(call)
            moves.append((call, "offload"))
        else:
            dear.append(call)
    repeated = [call for call in again if call in set(dear) and need.recompute_price(call) < exposed_price]
    moves += [(call, "recompute") for call in repeated]
    moves += [(call, "offload") for call in dear if call not in set(repeated)]
    # At last, the inputs of what is repeated.
    return moves + [(call, "offload") for call in (*cheap, *repeated)]


def _shortest(need: _Need, moves: Sequence[_Move], *, limit_bytes: int) -> _Choice:
    """The first moves of an order that suffice, without those that turn out unnecessary; all if none do."""
    picked: list[_Move] = []
    for move in moves:
        if need.bytes(need.given.with_moves(picked)) <= limit_bytes:
            break
        picked.append(move)
    if need.bytes(need.given.with_moves(picked)) > limit_bytes:
        return need.given.with_moves(picked)
    for move in sorted(picked, key=lambda move: -need.move_s(move)):
        rest = [other for other in picked if other != move]
        if need.bytes(need.given.with_moves(rest)) <= limit_bytes:
            picked = rest
    return need.given.with_moves(picked)
