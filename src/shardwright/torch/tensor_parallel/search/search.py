"""The search for placements: from several starts, the cheapest plan wins.

A *move* gives the parameters of one role (the query projections of all layers) a placement. Those parameters
follow that would be used in parts, or would get their gradients in parts: where the columns of `q` are cut,
the heads are cut in attention, and so are the gradients of `k` and `v`, and the rows of `o` that are used.
So most of a plan follows from one move::

    q: cut 0    ──►  k: cut 0,  v: cut 0,  o: cut 1
    up: cut 0   ──►  gate: cut 0,  down: cut 1

Starts: all whole; columns and rows in turn along the step; the hidden dimension. From each, the best move is
taken again and again, and then changes of single roles, until none makes the plan cheaper. What is pinned
(`torch/units/tensor_division.py`) is so in all of them.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup
from shardwright.torch.tensor_parallel.search.flow import Flow, cut_candidates
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks, recorded
from shardwright.torch.tensor_parallel.search.unit import Role, Unit, kind_of, pins_within, roles_of
from shardwright.torch.tensor_parallel.search.ways import (
    KERNEL_S,
    MEMORY_WEIGHT,
    OPERATION_S,
    FoundPlacements,
    Goal,
    PlanPrice,
    WorkShares,
)


@dataclass(slots=True)
class _UnitKind:
    """Units that are alike.

    Attributes:
        kept_whole: modules within one of them, and why.
        priced: what plans cost, by the placements of its roles.
    """

    units: list[tuple[str, Unit]]
    flow: Flow
    kept_whole: Mapping[str, str]
    roles: dict[str, int] = field(default_factory=dict)
    priced: dict[tuple[Placement, ...], tuple[PlanPrice, dict[int, list[Cut]]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, units: list[tuple[str, Unit]], group: TensorGroup, between: BetweenUnits | None
    ) -> "_UnitKind":
        unit, recording = recorded(units[0][1])
        reasons = {name: each.reason for name, each in unit.kept_whole.items()}
        return cls(units, Flow(recording, group, between), reasons)

    def price(
        self, plan: Sequence[Placement], *, num_microbatches: int
    ) -> tuple[PlanPrice, dict[int, list[Cut]]]:
        """What a plan costs one of them, and cuts in which whole parameters would be used, by role."""
        own = {name: plan[index] for name, index in self.roles.items()}
        key = tuple(own.values())
        found = self.priced.get(key)
        if found is None:
            passed = self.flow.run({name: each for name, each in own.items() if isinstance(each, Cut)})
            wants: dict[int, list[Cut]] = {}
            for name, cuts in passed.wants.items():
                if name not in self.roles:  # every rank needs all of it
                    continue
                wanted = wants.setdefault(self.roles[name], [])
                wanted += [cut for cut in cuts if cut not in wanted]
            exchange_s = passed.exchange_s * num_microbatches + passed.settle_s
            price = PlanPrice(passed.work_s * num_microbatches, exchange_s)
            found = self.priced[key] = price, wants
        return found

    def shares(self, plan: Sequence[Placement]) -> WorkShares:
        """Of the work of one of them, by the operations' prices, and what Python takes for each anyway."""
        recording = self.flow.recording
        own = {name: plan[index] for name, index in self.roles.items() if isinstance(plan[index], Cut)}
        part, whole = self.flow.run(own), self.flow.run({}, all_whole=True)
        forward_s = recording.num_forward * KERNEL_S
        backward_s = len(recording.operations) * KERNEL_S - forward_s
        return WorkShares(
            _share(part.forward_work_s, whole.forward_work_s, forward_s),
            _share(part.work_s - part.forward_work_s, whole.work_s - whole.forward_work_s, backward_s),
        )


def _share(part_s: float, whole_s: float, fixed_s: float) -> float:
    return (part_s + fixed_s) / (whole_s + fixed_s) if whole_s + fixed_s else 1.0


# Parameters below this share of the largest one are not cut for their own sake: they may follow others.
_SMALL = 1 / 1000
_MAX_SWEEPS = 8
_MAX_FOLLOWING = 4

# Differences below this are rounding.
_GAIN = 1 - 1e-6

_Plan = tuple[Placement, ...]
"""The placement of each role."""

_Move = dict[int, Placement]
"""New placements of some roles."""


def find_placements(
    units: Unit | Mapping[str, Unit],
    *,
    num_ranks: int,
    prices: Prices | None = None,
    optimize: Goal = "speed",
    num_microbatches: int = 1,
    pinned: Mapping[str, Placement] | None = None,
    between: BetweenUnits | None = None,
) -> FoundPlacements:
    """Finds placements of all parameters; on all ranks the same."""
    found = {"": units} if isinstance(units, Unit) else dict(units)
    given = prices or Prices(), optimize, num_microbatches, pinned or {}, between
    return _Search(found, num_ranks, *given).best()


@dataclass(frozen=True, slots=True)
class _Part:
    """Kinds of units and roles, by index, that can be searched apart from the others."""

    kinds: list[int]
    roles: list[int]


class _Search:
    """Kinds that share no parameters are searched one after the other: their prices add up."""

    def __init__(
        self,
        units: Mapping[str, Unit],
        num_ranks: int,
        prices: Prices,
        goal: Goal,
        num_microbatches: int,
        pinned: Mapping[str, Placement],
        between: BetweenUnits | None,
    ):
        self._num_ranks, self._num_microbatches = num_ranks, num_microbatches
        self._latency_s = prices.latency_s
        group = group_without_ranks(0, num_ranks, prices)
        by_kind: dict[object, list[tuple[str, Unit]]] = {}
        for name, unit in units.items():
            apart = unit.kept_whole or unit.following is not None
            kind: object = (name,) if apart else kind_of(unit.module, unit.args, unit.kwargs)
            key = kind, pins_within(name, unit, pinned)
            by_kind.setdefault(key, []).append((name, unit))
        self._kinds = [_UnitKind.of(each, group, between) for each in by_kind.values()]
        self._roles = roles_of([kind.units for kind in self._kinds], pinned)
        for index, role in enumerate(self._roles):
            for kind, name in role.members:
                if name in self._kinds[kind].flow.recording.parameters:
                    self._kinds[kind].roles[name] = index
        largest = max((_size(role) for role in self._roles if len(role.shape) > 1), default=0)
        self._is_large = [len(each.shape) > 1 and _size(each) >= largest * _SMALL for each in self._roles]
        self._byte_s = 0.0
        self._whole: _Plan = tuple(role.pinned or WHOLE for role in self._roles)
        self._all = _Part(list(range(len(self._kinds))), list(range(len(self._roles))))
        held = max(self._held(self._whole, self._all), 1)
        self._byte_s = MEMORY_WEIGHT[goal] * self._whole_step_s() / held

    def _cuts(self, role: Role) -> list[Cut]:
        kind, name = role.members[0]
        found: dict[Cut, None] = {}
        if name not in self._kinds[kind].roles:  # of a module that is kept whole
            return []
        for dim in range(len(role.shape)):
            found |= dict.fromkeys(cut_candidates(self._kinds[kind].flow, name, dim, self._num_ranks))
        return list(found)

    def _parts(self) -> list[_Part]:
        """Kinds and roles that belong together."""
        found: list[_Part] = []
        for index, kind in enumerate(self._kinds):
            own = _Part([index], list(dict.fromkeys(kind.roles.values())))
            for other in [each for each in found if set(each.roles) & set(own.roles)]:
                found.remove(other)
                own = _Part(sorted(other.kinds + own.kinds), sorted({*other.roles, *own.roles}))
            found.append(own)
        return found

    # ---- what a plan costs ----

    def _price(self, plan: _Plan, part: _Part) -> PlanPrice:
        total = PlanPrice(memory_s=self._held(plan, part) * self._byte_s)
        for index in part.kinds:
            kind = self._kinds[index]
            price, _ = kind.price(plan, num_microbatches=self._num_microbatches)
            total += PlanPrice(price.work_s * len(kind.units), price.exchange_s * len(kind.units))
        return total

    def _total_s(self, plan: _Plan, part: _Part) -> float:
        return self._price(plan, part).total_s

    def _held(self, plan: _Plan, part: _Part) -> float:
        """Bytes of large parameters on the rank with most. Small ones are cut where that saves time only."""
        held = 0.0
        for index in part.roles:
            if self._is_large[index]:
                role, placement = self._roles[index], plan[index]
                cut = placement if isinstance(placement, Cut) else None
                held += role.local_elements(cut, self._num_ranks) * role.itemsize
        return held

    def _whole_step_s(self) -> float:
        operations = sum(len(kind.flow.recording.operations) * len(kind.units) for kind in self._kinds)
        work_s = self._price(self._whole, self._all).work_s
        # A model so small that latency is most of its step is divided for its memory, or for a trial.
        operation_s = max(OPERATION_S, self._latency_s)
        return work_s + operations * operation_s * self._num_microbatches

    def _wants(self, plan: _Plan, part: _Part) -> dict[int, list[Cut]]:
        """Cuts in which whole parameters would be used, by role."""
        found: dict[int, list[Cut]] = {}
        for index in part.kinds:
            _, wants = self._kinds[index].price(plan, num_microbatches=self._num_microbatches)
            for role, cuts in wants.items():
                known = found.setdefault(role, [])
                known += [cut for cut in cuts if cut not in known]
        return {
            role: cuts
            for role, cuts in found.items()
            if not isinstance(plan[role], Cut) and self._roles[role].pinned is None
        }

    # ---- moves ----

    def _followed(self, plan: _Plan, part: _Part) -> _Plan:
        """The plan after parameters followed, one after the other as long as that makes it cheaper."""
        price = functools.partial(self._total_s, part=part)
        for _ in range(_MAX_FOLLOWING):
            wants = self._wants(plan, part)
            # All together first: what one alone would cost, others may save.
            together = plan
            for role, cuts in wants.items():
                together = _with(together, role, cuts[0])
            best = min([plan, together], key=price)
            if best == plan:
                single = (_with(plan, role, cut) for role, cuts in wants.items() for cut in cuts)
                best = min([plan, *single], key=price)
            if best == plan:
                break
            plan = best
        return plan

    def _moves(self, part: _Part) -> list[_Move]:
        """A cut of one role, and all that follows from it where everything else is whole."""
        found: dict[tuple[tuple[int, Placement], ...], None] = {}
        for role in part.roles:
            for cut in self._roles[role].cuts:
                plan = self._followed(_with(self._whole, role, cut), part)
                found[tuple((index, each) for index, each in enumerate(plan) if each != WHOLE)] = None
        return [dict(each) for each in found]

    def _improved(self, plan: _Plan, part: _Part, moves: list[_Move]) -> _Plan:
        """The plan after moves, and changes of one role, as long as one makes it cheaper."""
        for _ in range(_MAX_SWEEPS):
            before = plan
            plan = self._by_moves(plan, part, moves)
            plan = self._by_single_changes(plan, part)
            if plan == before:
                break
        return plan

    def _by_moves(self, plan: _Plan, part: _Part, moves: list[_Move]) -> _Plan:
        """Takes the move that gains most, as long as one gains."""
        price = functools.partial(self._total_s, part=part)
        while True:
            trials = (tuple(move.get(index, each) for index, each in enumerate(plan)) for move in moves)
            best = min([plan, *trials], key=price)
            if price(best) >= price(plan) * _GAIN:
                return plan
            plan = best

    def _by_single_changes(self, plan: _Plan, part: _Part) -> _Plan:
        """Changes one role after the other, where that makes the plan cheaper."""
        wants = self._wants(plan, part)
        for index in part.roles:
            if self._roles[index].pinned is not None:
                continue
            choices: list[Placement] = [*self._roles[index].cuts, *wants.get(index, []), WHOLE]
            for placement in dict.fromkeys(choices):
                if placement == plan[index]:
                    continue
                trial = _with(plan, index, placement)
                if self._total_s(trial, part) < self._total_s(plan, part) * _GAIN:
                    plan = trial
        return plan

    # ---- starts ----

    def _in_turn(self, part: _Part) -> _Plan:
        """Columns of one matrix, rows of the next, along the step."""
        plan, is_column = self._whole, True
        for index in part.roles:
            cuts = self._roles[index].cuts
            wanted = [cut for cut in cuts if (cut.dim == 0) == is_column] or cuts
            if wanted:
                plan = _with(plan, index, wanted[0])
                is_column = not is_column
        return self._followed(plan, part)

    def _hidden(self, part: _Part) -> _Plan:
        """The dimension that most matrices have is cut in all of them."""
        counts: Counter[int] = Counter()
        for index in part.roles:
            counts.update({cut.size for cut in self._roles[index].cuts})
        plan = self._whole
        if counts:
            width = max(counts, key=lambda size: (counts[size], -size))
            for index in part.roles:
                cuts = [cut for cut in self._roles[index].cuts if cut.size == width]
                if cuts:
                    plan = _with(plan, index, cuts[-1])
        return self._followed(plan, part)

    def best(self) -> FoundPlacements:
        """The cheapest plan: of all starts, for each part."""
        for index, role in enumerate(self._roles):
            if self._is_large[index] and role.pinned is None:
                role.cuts = self._cuts(role)
        plan = list(self._whole)
        for part in self._parts():
            moves = self._moves(part)
            starts = self._whole, self._in_turn(part), self._hidden(part)
            ends = [self._improved(each, part, moves) for each in starts]
            best = min(ends, key=functools.partial(self._total_s, part=part))
            for index in part.roles:
                plan[index] = best[index]
        return self._found(tuple(plan))

    def _found(self, plan: _Plan) -> FoundPlacements:
        cut = [
            (role, each)
            for role, each in zip(self._roles, plan, strict=True)
            if isinstance(each, Cut) and each.runs  # what has no elements has no parts
        ]
        elements = sum(role.num_elements for role in self._roles)
        return FoundPlacements(
            placements={name: each for role, each in cut for name in role.full_names},
            price=self._price(plan, self._all),
            whole_price=self._price(self._whole, self._all),
            divided=sum(role.num_elements for role, _ in cut) / max(elements, 1),
            kind_of={name: kind.units[0][0] for kind in self._kinds for name, _ in kind.units},
            shares={kind.units[0][0]: kind.shares(plan) for kind in self._kinds},
            kept_whole=self._kept_whole(),
        )

    def _kept_whole(self) -> dict[str, str]:
        return {
            ".".join(filter(None, (unit, module))): reason
            for kind in self._kinds
            for unit, _ in kind.units
            for module, reason in kind.kept_whole.items()
        }


def _size(role: Role) -> int:
    found = 1
    for each in role.shape:
        found *= each
    return found


def _with(plan: _Plan, role: int, placement: Placement) -> _Plan:
    return (*plan[:role], placement, *plan[role + 1 :])
