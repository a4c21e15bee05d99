"""A chain cut into stages on ranks: the cost of each stage, and the values between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.calibration import OFFLOADED_CALL_S
from shardwright.placement import size_of_buckets
from shardwright.planner.chain import Chain, ParameterUse, StateBytes
from shardwright.schedule import Edge, StageCost


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The stage and the rank of every call.

    Attributes:
        cuts: position of the first call of each stage, then the number of calls.
        recompute: for each call, whether its activations are recomputed in the backward.
        slowness: for each pipeline rank, how many times as long its calls take; empty: once.
        offload: for each call, whether what it keeps is offloaded; None: of no call.
        horizon: calls of a stage ahead of their backward that come back; as many leave behind a forward.
    """

    chain: Chain
    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    recompute: NDArray[np.bool_]
    slowness: tuple[float, ...] = ()
    offload: NDArray[np.bool_] | None = None
    horizon: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @property
    def stage_of_call(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.num_stages), np.diff(np.asarray(self.cuts)))

    def calls(self, stage: int) -> range:
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    @property
    def offloads(self) -> bool:
        return self.offload is not None and bool(self.offload.any())

    def stage_costs(self) -> tuple[StageCost, ...]:
        """Seconds and bytes of each stage for one microbatch."""
        costs = self._stage_costs_kept()
        if not self.offloads:
            return costs
        leaving = self.leaving_bytes()
        whole_calls = (leaving > 0) & ~self.recompute  # of others, hardly more than an input leaves
        return tuple(
            self._with_offload(
                cost,
                [size for size in leaving[start:end].tolist() if size],
                handling_s=OFFLOADED_CALL_S * float(whole_calls[start:end].sum()),
            )
            for cost, start, end in zip(costs, self.cuts[:-1], self.cuts[1:], strict=True)
        )

    def _with_offload(self, cost: StageCost, sizes: Sequence[float], *, handling_s: float) -> StageCost:
        """The cost of a stage of which calls offload so many bytes, in order."""
        moved = int(sum(sizes))
        if not moved:
            return cost
        most = self.horizon + 1
        window = max(sum(sizes[first : first + most]) for first in range(len(sizes)))
        return replace(
            cost,
            forward_s=cost.forward_s + handling_s,
            backward_s=cost.backward_s + handling_s,
            input_s=None if cost.input_s is None else cost.input_s + handling_s,
            saved_bytes=max(0, cost.saved_bytes - moved),
            weight_bytes=cost.saved_bytes if cost.weight_bytes is None else cost.weight_bytes,
            offload_bytes=moved,
            window_bytes=int(window),
            tail_bytes=int(min(window, sum(sizes[-self.horizon :]))),
        )

    def _stage_costs_kept(self) -> tuple[StageCost, ...]:
        """Seconds and bytes of each stage, with what is offloaded among what it keeps."""
        chain = self.chain
        saved = self.saved_bytes()
        again = np.where(self.recompute, chain.column("recompute_s"), 0.0)
        times = np.array([self.slowness[rank] for rank in self.ranks]) if self.slowness else 1.0
        columns = [
            (np.add.reduceat(values, np.asarray(self.cuts[:-1])) * factor).tolist()
            for values, factor in (
                (chain.column("forward_s"), times),
                (chain.column("backward_s"), times),
                (chain.column("input_s"), times),
                (chain.column("weight_s"), times),
                (saved, 1.0),
                (again, times),
                (chain.column("weight_bytes"), 1.0),
            )
        ]
        return tuple(
            StageCost(
                forward_s=forward,
                backward_s=backward,
                weight_s=weight,
                input_s=inputs,
                saved_bytes=max(0, int(num_bytes) + sent - twice),
                recompute_s=recompute,
                weight_bytes=None if isnan(left) else int(left),
            )
            for forward, backward, inputs, weight, num_bytes, recompute, left, sent, twice in zip(
                *columns, self.sent_bytes(), self._counted_twice(), strict=True
            )
        )

    def saved_bytes(self) -> NDArray[np.float64]:
        """For each call, what it and the operations at home with it keep; values that others keep too."""
        chain = self.chain
        return np.where(
            self.recompute, chain.column("kept_bytes"), chain.column("saved_bytes")
        ) + chain.column("glue_bytes")

    def leaving_bytes(self) -> NDArray[np.float64]:
        """For each call, the bytes that it offloads; a value that several calls offload goes with the first.

        Values of other stages, and those that others get, stay: the runtime keeps them anyway. So do those
        that an operation between the calls keeps, too.
        """
        chain = self.chain
        if self.offload is None:
            return np.zeros(chain.num_calls)
        kept = np.where(self.recompute, chain.column("kept_bytes"), chain.column("saved_bytes"))
        leaving = np.where(self.offload, kept, 0.0)
        stage, recompute = self.stage_of_call.tolist(), self.recompute.tolist()
        for value in chain.saved_values:
            home = stage[value.source]
            keepers = sorted(
                {call for call in value.savers if not recompute[call]}
                | {call for call in value.readers if recompute[call]}
            )
            staying = {stage[call] for call in (*value.glue_savers, *keepers) if not self.offload[call]}
            staying |= {stage[call] for call in value.glue_savers}
            if value.sent >= 0 and stage[value.sent] != home:
                staying.add(home)
            for call in keepers:
                if not self.offload[call]:
                    continue
                own = stage[call]
                if own != home or own in staying:
                    leaving[call] -= value.num_bytes
                staying.add(own)  # for the calls behind: it goes once
        return np.maximum(leaving, 0.0)

    def _counted_twice(self) -> list[int]:
        """For each stage, the bytes of values that several of its calls keep, but for the first time."""
        stage, recompute = self.stage_of_call.tolist(), self.recompute.tolist()
        extra = [0] * self.num_stages
        for value in self.chain.saved_values:
            counts: dict[int, int] = {}
            for call in value.keepers(recompute):
                counts[stage[call]] = counts.get(stage[call], 0) + 1
            home = stage[value.source]
            if value.sent >= 0 and stage[value.sent] != home and home in counts:
                counts[home] += 1
            for taker in {stage[call] for call in value.takers}:
                if self.ranks[taker] != self.ranks[home]:
                    counts.setdefault(taker, 0)
            for where, count in counts.items():
                extra[where] += (count - 1) * value.num_bytes
        return extra

    def sent_bytes(self) -> list[int]:
        """For each stage, the bytes of its values that get a gradient from another."""
        stage = self.stage_of_call.tolist()
        sizes = [0] * self.num_stages
        for flow in self.chain.flows:
            source = stage[flow.source]
            if flow.gradient_targets and stage[flow.gradient_targets[-1]] != source:
                sizes[source] += flow.num_bytes
        return sizes

    def edges(self) -> tuple[Edge, ...]:
        stage = self.stage_of_call.tolist()
        sizes: dict[tuple[int, int], list[int]] = {}
        for flow in self.chain.flows:
            source = stage[flow.source]
            for target in dict.fromkeys(stage[call] for call in flow.targets):
                if target != source:
                    sizes.setdefault((source, target), [0, 0])[0] += flow.num_bytes
            for target in dict.fromkeys(stage[call] for call in flow.gradient_targets):
                if target != source:
                    sizes[source, target][1] += flow.gradient_bytes
        return tuple(
            Edge(
                source=source,
                target=target,
                num_bytes=num_bytes,
                gradient_bytes=gradient_bytes,
                has_gradient=gradient_bytes > 0,
            )
            for (source, target), (num_bytes, gradient_bytes) in sorted(sizes.items())
        )

    def replicated(self) -> dict[str, tuple[int, ...]]:
        """Parameters that more than one rank holds, with the stages that read them."""
        stage = self.stage_of_call.tolist()
        found = {}
        for use in self.chain.parameters:
            stages = tuple(dict.fromkeys(stage[call] for call in use.calls))
            if len({self.ranks[s] for s in stages}) > 1:
                found[use.name] = stages
        return found

    def state_bytes(self) -> list[StateBytes]:
        """For each rank, what its parameters and buffers take, each once, with what it gathers of others."""
        most = self.chain.most_gathered
        return [
            state._replace(parameters=state.parameters + int(min(state.gathered, most)), gathered=0)
            for state in self._states()
        ]

    def first_gradients(self) -> NDArray[np.int64]:
        """For each call, the bytes of gradients that stay of which its backward is the first on its rank."""
        found = np.zeros(self.chain.num_calls, dtype=np.int64)
        rank_of = np.asarray(self.ranks)[self.stage_of_call].tolist()
        for use, ranks in self.holders():
            num_bytes = use.state(may_be_shared=len(ranks) == 1).gradients
            for rank in ranks:
                found[max(call for call in use.calls if rank_of[call] == rank)] += num_bytes
        return found

    def reduced_gradients(self) -> NDArray[np.int64]:
        """For each call, the bytes of gradients that are reduced, or wait for it, while its backward runs.

        They are those of parameters that replicas share, whole, above the rows that stay: one bucket is
        filled while another is reduced.
        """
        chain = self.chain
        found = np.zeros(chain.num_calls, dtype=np.int64)
        if not chain.most_reduced:
            return found
        rank_of = np.asarray(self.ranks)[self.stage_of_call]
        largest, behind = [0] * self.num_ranks, np.zeros(chain.num_calls, dtype=np.int64)
        for use, ranks in self.holders():
            if use.trained and use.shared is not None and len(ranks) == 1:
                above = (use.num_bytes - use.shared.gradients) * use.wide
                largest[min(ranks)] = max(largest[min(ranks)], above)
                behind[max(use.calls)] += above
        for rank, most in enumerate(largest):
            calls = np.flatnonzero(rank_of == rank)
            come = np.cumsum(behind[calls][::-1])[::-1]
            bucket = max(most, size_of_buckets(int(come[0]), most=chain.most_reduced))
            found[calls[:-1]] = np.minimum(come[1:], 2 * bucket)
        return found

    def gatherings(self) -> list[int]:
        """For each rank, how often in a batch it gathers rows of other ranks."""
        most = self.chain.most_gathered
        return [
            (1 if state.gathered <= most else self.chain.gatherings) if state.gathered else 0
            for state in self._states()
        ]

    def _states(self) -> list[StateBytes]:
        sizes = [StateBytes() for _ in range(self.num_ranks)]
        for use, ranks in self.holders():
            state = use.state(may_be_shared=len(ranks) == 1)
            for rank in ranks:
                sizes[rank] = StateBytes(*map(sum, zip(sizes[rank], state, strict=True)))
        return sizes

    def num_trained(self) -> list[int]:
        """For each rank, how many parameters its optimizer updates."""
        found = [0] * self.num_ranks
        for use, ranks in self.holders():
            for rank in ranks if use.trained else ():
                found[rank] += 1
        return found

    def trained_bytes(self) -> list[tuple[int, int]]:
        """For each rank, the bytes of trained parameters that replicas do not share, and of the others."""
        sizes = [[0, 0] for _ in range(self.num_ranks)]
        for use, ranks in self.holders():
            shared = use.shared is not None and len(ranks) == 1
            for rank in ranks if use.trained else ():
                sizes[rank][shared] += use.num_bytes
        return [(apart, shared) for apart, shared in sizes]

    def holders(self) -> Iterator[tuple[ParameterUse, set[int]]]:
        """Parameters, with the ranks that hold them."""
        rank_of = np.asarray(self.ranks)[self.stage_of_call].tolist()
        for use in self.chain.parameters:
            yield use, {rank_of[call] for call in use.calls}

    def settling_seconds(self) -> float:
        """Seconds in which the tensor-parallel ranks of a stage settle gradients once a step, at most."""
        of_calls = self.chain.column("settling_s")
        sums = np.bincount(np.asarray(self.ranks)[self.stage_of_call], of_calls, minlength=1)
        return float(sums.max())

    def exchange(self, stage: int) -> dict[str, Any]:
        """Seconds and bytes of one rank in which tensor-parallel ranks exchange for a microbatch."""
        names = ("forward_exchange_s", "backward_exchange_s", "exchange_bytes")
        calls = [self.chain.costs[call] for call in self.calls(stage)]
        return {name: sum(getattr(cost, name) for cost in calls) for name in names}

    def stage_parameter_bytes(self) -> list[int]:
        """For each stage, the bytes of the parameters and buffers that it reads, each once."""
        sizes = [0] * self.num_stages
        stage = self.stage_of_call.tolist()
        for use in self.chain.parameters:
            for reader in {stage[call] for call in use.calls}:
                sizes[reader] += use.num_bytes
        return sizes

    def with_offload(self, calls: Sequence[int]) -> "Layout":
        """The same layout in which exactly these calls offload what they keep."""
        offload = np.zeros(self.chain.num_calls, dtype=bool)
        offload[list(calls)] = True
        return replace(self, offload=offload)

    def with_recompute(self, calls: Sequence[int]) -> "Layout":
        """The same layout with exactly these calls recomputed."""
        recompute = np.zeros(self.chain.num_calls, dtype=bool)
        recompute[list(calls)] = True
        return replace(self, recompute=recompute)
