"""A chain cut into stages on ranks: the cost of each stage, and the values between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.chain import Chain, ParameterUse, StateBytes
from shardwright.schedule import Edge, StageCost

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where every call runs.

    Attributes:
        chain: what is cut.
        cuts: position of the first call of each stage, then the number of calls.
        ranks: pipeline rank of each stage.
        recompute: for each call, whether its activations are recomputed in the backward.
        slowness: for each pipeline rank, how many times as long its calls take; empty: once.
    """

    chain: Chain
    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    recompute: NDArray[np.bool_]
    slowness: tuple[float, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages, over all ranks."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def stage_of_call(self) -> NDArray[np.int64]:
        """The stage of each call."""
        return np.repeat(np.arange(self.num_stages), np.diff(np.asarray(self.cuts)))

    def calls(self, stage: int) -> range:
        """Positions of the calls of a stage."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def stage_costs(self) -> tuple[StageCost, ...]:
        """Seconds and bytes of each stage for one microbatch."""
        chain = self.chain
        saved = self.saved_bytes()
        again = np.where(self.recompute, chain.recompute_s, 0.0)
        times = np.array([self.slowness[rank] for rank in self.ranks]) if self.slowness else 1.0
        columns = [
            (np.add.reduceat(values, np.asarray(self.cuts[:-1])) * factor).tolist()
            for values, factor in (
                (chain.forward_s, times),
                (chain.backward_s, times),
                (chain.input_s, times),
                (chain.weight_s, times),
                (saved, 1.0),
                (again, times),
                (chain.weight_bytes, 1.0),
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
        return np.where(self.recompute, chain.kept_bytes, chain.saved_bytes) + chain.glue_bytes

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
            for where, count in counts.items():
                extra[where] += (count - 1) * value.num_bytes
        return extra

    def sent_bytes(self) -> list[int]:
        """For each stage, the bytes of its values that get a gradient from another.

        They are kept until its backward, which starts from them.
        """
        stage = self.stage_of_call.tolist()
        sizes = [0] * self.num_stages
        for flow in self.chain.flows:
            source = stage[flow.source]
            if flow.gradient_targets and stage[flow.gradient_targets[-1]] != source:
                sizes[source] += flow.num_bytes
        return sizes

    def edges(self) -> tuple[Edge, ...]:
        """What flows from stage to stage, each value once for each pair of stages."""
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

    def stage_parameter_bytes(self) -> list[int]:
        """For each stage, the bytes of the parameters and buffers that it reads, each once."""
        sizes = [0] * self.num_stages
        stage = self.stage_of_call.tolist()
        for use in self.chain.parameters:
            for reader in {stage[call] for call in use.calls}:
                sizes[reader] += use.num_bytes
        return sizes

    def with_recompute(self, calls: Sequence[int]) -> "Layout":
        """The same layout with exactly these calls recomputed."""
        recompute = np.zeros(self.chain.num_calls, dtype=bool)
        recompute[list(calls)] = True
        return replace(self, recompute=recompute)
