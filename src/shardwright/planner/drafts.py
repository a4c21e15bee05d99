"""The drafts of a chain: schedule family x stages per rank x ties x sharing, and the plan of before.

`Sharing`: each of n sharding ranks keeps 1 / n of a large parameter, of its gradient and of its optimizer
state. Until gradients are reduced, each rank has whole ones instead: all of them if it accumulates several
microbatches, otherwise those of the bucket that is filled and of the one that is reduced. Over several hosts,
each also gathers the rows of others, up to the limit of gathered rows.

`refine` moves the cuts of an option to shorten its simulated step: the slowest stage, which
`costs.chain.split` makes as fast as possible, is not the whole story. Cuts are simulated only if the lower
bound of the step leaves room for a gain.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, inf

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.placement import SHARDED_BUCKET_BYTES
from shardwright.plan import Plan
from shardwright.planner.chain import Bond, Chain, ParameterUse, StateBytes
from shardwright.planner.cuts import improve, manual_stages
from shardwright.planner.draft import Draft, Option, make_draft
from shardwright.planner.fabric import Fabric
from shardwright.planner.objective import Demands
from shardwright.planner.reasons import SIMPLICITY, cuts_of
from shardwright.planner.workload import Workload
from shardwright.schedule import place_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The sharing of a stage's parameters among its replicas.

    Attributes:
        degree: ranks that share; 1: none do.
        threshold: elements below which a parameter is not shared.
        adds_up: gradients are added up over microbatches before they are reduced.
        gatherings: how often in a batch rows of other hosts are gathered where there is no room for all.
        reductions: how often in a batch gradients are reduced between the ranks that share.
        most_reduced: bytes of gradients that are reduced at once, at most.
        on_host: of the ranks that share, those on one host: together they have room for all rows where
            others are elsewhere.
        most_live: elements that may be gathered at once.
        updates: ranks with the same rows that share the optimizer's state; 1: none do.
        low_precision: parameters have 16 bits, gradients and updates 32.
    """

    degree: int = 1
    threshold: int = 0
    adds_up: bool = False
    on_host: int = 1
    most_live: int = 10**9
    gatherings: int = 1
    reductions: int = 1
    most_reduced: int = 0
    updates: int = 1
    low_precision: bool = False

    @classmethod
    def ways(cls, config: Config, mesh: Mesh, cluster: Cluster, *, num_microbatches: int) -> list["Sharing"]:
        """The ways that the settings leave open, from the fastest to the one with the least memory."""
        choices = [False] if num_microbatches == 1 or mesh.shard == 1 else [False, True]
        return [
            cls._way(config, mesh, cluster, num_microbatches=num_microbatches, every=every)
            for every in choices
        ]

    @classmethod
    def _way(
        cls, config: Config, mesh: Mesh, cluster: Cluster, *, num_microbatches: int, every: bool
    ) -> "Sharing":
        group = mesh.group("dp_shard", 0)
        hosts = [rank // cluster.ranks_per_node for rank in group]
        return cls(
            degree=mesh.shard,
            threshold=config.sdp_param_persistence_threshold,
            adds_up=num_microbatches > 1 and not every,
            gatherings=2 * num_microbatches,
            reductions=num_microbatches if every else 1,
            most_reduced=SHARDED_BUCKET_BYTES,
            on_host=hosts.count(hosts[0]),
            most_live=config.sdp_max_live_parameters,
            updates=config.num_updating(mesh),
            low_precision=config.bf16 or config.fp16,
        )

    def applied(self, chain: Chain) -> Chain:
        """The chain, with the memory that its parameters take on each rank."""
        if self.degree == self.updates == 1 and not self.low_precision:
            return chain
        parameters = tuple(map(self._applied, chain.parameters))
        widest = max((u.num_bytes / u.num_elements for u in parameters if u.shared is not None), default=0)
        return replace(
            chain,
            parameters=parameters,
            most_gathered=math.ceil(self.most_live * widest / self.on_host),
            gatherings=self.gatherings,
            reductions=self.reductions,
            most_reduced=0 if self.adds_up or self.degree == 1 else self.most_reduced,
        )

    def _applied(self, use: ParameterUse) -> ParameterUse:
        shares = self.degree > 1 and not use.is_buffer and use.num_elements >= max(1, self.threshold)
        shared = self._shared(use) if shares else None
        return replace(use, shared=shared, updates=self.updates, wide=2 if self.low_precision else 1)

    def _shared(self, use: ParameterUse) -> StateBytes:
        part = -(-use.num_bytes // self.degree)
        gathered = -(-use.num_bytes // self.on_host) if self.on_host < self.degree else 0
        trained = part if use.trained else 0
        gradients = use.num_bytes if use.trained and self.adds_up else trained
        return StateBytes(parameters=part, gradients=gradients, optimized=trained, gathered=gathered)


_MOST_TIES = 2
_MOST_BONDS = 3


def drafts_of(
    chain: Chain,
    m: int,
    placement: Mapping[str, int],
    *,
    config: Config,
    fabric: Fabric,
    demands: Demands,
    previous: Plan | None,
) -> list[Draft]:
    """Drafts with m microbatches, sharing parameters in a way that has room, the fastest first."""
    drafts: list[Draft] = []
    for sharing in Sharing.ways(config, fabric.mesh, fabric.cluster, num_microbatches=m):
        shared = sharing.applied(chain)
        if config.auto_partition:
            drafts += _automatic(shared, m, config=config, fabric=fabric, demands=demands)
            drafts += _again(previous, shared, m, config=config, fabric=fabric, demands=demands)
        else:
            drafts += _manual(shared, m, placement, config=config, fabric=fabric, demands=demands)
        if any(draft.overflow_bytes <= 0 and not draft.keeps_less for draft in drafts):
            break  # taking less memory would spare nothing
    return drafts


def schedule_families(config: Config, *, pipeline: int) -> Iterator[tuple[str, int]]:
    """Schedule families and stages per rank that the settings allow."""
    pinned = config.virtual_stages
    if config.pipeline != "auto":
        kinds: Sequence[str] = (config.pipeline,)
    elif pipeline == 1 and pinned in (None, 1):
        # One rank takes its microbatches one by one, whatever the family.
        kinds = ("1f1b",)
    else:
        kinds = SIMPLICITY
    for kind in kinds:
        if kind == "interleaved_1f1b":
            yield from ((kind, v) for v in ((2, 3, 4) if pinned is None else (pinned,)))
        elif kind == "zb_v":
            yield from ((kind, 2) for _ in range(pinned in (None, 2)))
        elif pinned in (None, 1):
            yield kind, 1


def _automatic(chain: Chain, m: int, *, config: Config, fabric: Fabric, demands: Demands) -> Iterator[Draft]:
    pipeline = fabric.mesh.pipeline
    families = list(schedule_families(config, pipeline=pipeline))
    least = min(v for _, v in families)
    fewest, bound = pipeline * least, chain.bound(stages_per_rank=least)
    if fewest > bound.num_atoms:
        raise PlanError(_too_many_stages(bound, pipeline, least))
    for variant in tie_variants(bound, fewest):
        one, several = (variant.bound(stages_per_rank=v) for v in (1, 2))
        plain = interleaved = Workload(one, num_microbatches=m, fabric=fabric, demands=demands)
        if several.starts != one.starts:
            interleaved = Workload(several, num_microbatches=m, fabric=fabric, demands=demands)
        for kind, v in families:
            workload = plain if v == 1 else interleaved
            if pipeline * v > workload.chain.num_atoms:
                continue
            ranks = place_stages(kind, num_ranks=pipeline, stages_per_rank=v)
            # With few units, or several stages a rank, hosts that differ little are best cut as if alike.
            by_speed = (True, False) if fabric.slowness else (True,)
            seen: set[tuple[int, ...]] = set()
            for exposed, heeds_speed in itertools.product((1.0, 0.0), by_speed):
                draft = make_draft(workload, kind, ranks, exposed=exposed, heeds_speed=heeds_speed)
                if draft.layout.cuts not in seen:
                    seen.add(draft.layout.cuts)
                    yield draft


def _again(
    previous: Plan | None, chain: Chain, m: int, *, config: Config, fabric: Fabric, demands: Demands
) -> Iterator[Draft]:
    """The previous plan, if it is one for this chain, these ranks and settings."""
    if previous is None or previous.schedule.microbatches != m or previous.model.units != chain.labels:
        return
    pipeline, ranks = fabric.mesh.pipeline, previous.stage_ranks
    families = set(schedule_families(config, pipeline=pipeline))
    if previous.mesh.pipeline != pipeline or (previous.schedule.kind, len(ranks) // pipeline) not in families:
        return
    bound = chain.bound(stages_per_rank=len(ranks) // pipeline)
    cuts = cuts_of(previous)
    if set(cuts) <= set(bound.starts):
        workload = Workload(bound, num_microbatches=m, fabric=fabric, demands=demands)
        yield make_draft(workload, previous.schedule.kind, ranks, cuts=cuts)


def tie_variants(chain: Chain, num_stages: int) -> Iterator[Chain]:
    """The chain, and the chain with the largest ties each kept on one rank with all that lies between."""
    yield chain
    for group in chain.ties()[:_MOST_TIES]:
        calls = [call for use in group for call in use.calls]
        contracted = chain.contract([(min(calls), max(calls))])
        if contracted.num_atoms >= num_stages:
            yield contracted


def _manual(
    chain: Chain, m: int, placement: Mapping[str, int], *, config: Config, fabric: Fabric, demands: Demands
) -> Iterator[Draft]:
    pipeline = fabric.mesh.pipeline
    default = config.default_partition or 0
    of_call = [placement.get(label.split("#")[0], default) for label in chain.labels]
    cuts, ranks = manual_stages(of_call, num_ranks=pipeline)
    # One module has one place, so calls that must stay together do, wherever the cuts are.
    workload = Workload(chain.uncontracted(), num_microbatches=m, fabric=fabric, demands=demands)
    kinds = (config.pipeline,) if config.pipeline != "auto" else ("1f1b", "gpipe", "zb_h1")
    for kind in kinds:
        yield make_draft(workload, kind, ranks, cuts=cuts)


def _too_many_stages(chain: Chain, pipeline: int, stages_per_rank: int) -> str:
    fit = chain.num_atoms
    per_rank = "" if stages_per_rank == 1 else f", {stages_per_rank} a rank"
    fewer = "" if stages_per_rank == 1 else "lower virtual_stages, take another pipeline, "
    merged, instead = "", "use a model with more, smaller blocks."
    if chain.num_calls > fit:
        bonds = _longest_bonds(chain, stages_per_rank)[:_MOST_BONDS]
        texts = [f"{chain.labels[b.first]} to {chain.labels[b.last]} for {b.reason}" for b in bonds]
        merged = f" ({chain.num_calls} unit calls, of which some must share a stage: {'; '.join(texts)})"
        instead = f"change the model: {bonds[0].remedy}"
    return (
        f"{pipeline} pipeline ranks need at least {pipeline * stages_per_rank} stages{per_rank}, but the "
        f"model has {fit} units to place{merged}. Use at most {fit} stages: {fewer}start fewer ranks, or "
        f"let them train replicas by a smaller pipeline_parallel_degree. Or {instead}"
    )


def _longest_bonds(chain: Chain, stages_per_rank: int) -> list[Bond]:
    """The bonds with the longest reach first; a bond inside of another is left out."""
    found: list[Bond] = []
    for bond in sorted(chain.bonds, key=lambda bond: bond.first - bond.last):
        inside = any(other.first <= bond.first and bond.last <= other.last for other in found)
        if not inside and (stages_per_rank > 1 or not bond.one_rank):
            found.append(bond)
    return found


# So many ways to cut are all looked at.
_FEW_PARTITIONS = 100

# Sums of the same seconds in another order differ by less.
_ROUNDING = 1 + 1e-9

Cuts = tuple[int, ...]


def refine(option: Option, *, max_actions: int) -> Option:
    """Moves cuts while the simulated step gets shorter; of a few ways to cut, finds the best of all."""
    actions = sum(map(len, option.schedule.actions))
    if 2 * option.layout.num_stages * actions > max_actions:
        return option
    trials = _Trials(option, max_trials=max_actions / actions)
    best = improve(trials.start, key=trials.key)
    num_atoms, inner = option.workload.chain.num_atoms, len(best) - 2
    if comb(num_atoms - 1, inner) <= _FEW_PARTITIONS:
        # One cut or a few neighbours at a time do not lead everywhere; the bound makes looking cheap.
        others = itertools.combinations(range(1, num_atoms), inner)
        best = min([best, *((0, *cuts, num_atoms) for cuts in others)], key=trials.key)
    return trials.simulated[best]


class _Trials:
    """The other cuts that were tried for one option.

    Attributes:
        simulated: the options that were worked out, by their cuts.
    """

    def __init__(self, option: Option, *, max_trials: float) -> None:
        atom_at = {call: atom for atom, call in enumerate(option.workload.chain.starts)}
        self.start: Cuts = tuple(atom_at[cut] for cut in option.layout.cuts)
        self.simulated = {self.start: option}
        self._option = option
        self._max_trials = max_trials
        self._hopeless: set[Cuts] = set()
        self._shortest_s = option.step_s if option.fits else inf

    def key(self, cuts: Cuts) -> tuple[float, ...]:
        """The key to minimise: excess bytes, then seconds; infinite for cuts that are not worked out."""
        if cuts not in self.simulated and not self._simulate(cuts):
            return (inf,)
        found = self.simulated[cuts]
        return max(0, found.overflow_bytes), found.step_s

    def _simulate(self, cuts: Cuts) -> bool:
        if cuts in self._hopeless or len(self.simulated) >= self._max_trials:
            return False
        workload, option = self._option.workload, self._option
        calls = tuple(workload.chain.starts[cut] for cut in cuts)
        draft = make_draft(workload, option.kind, option.layout.ranks, cuts=calls)
        if draft.least_s > self._shortest_s * _ROUNDING:
            self._hopeless.add(cuts)
            return False
        found = self.simulated[cuts] = draft.work_out()
        if found.fits:
            self._shortest_s = min(self._shortest_s, found.step_s)
        return True


def seconds_without_pipeline(
    chains: Mapping[int, Chain], mesh: Mesh, *, cluster: Cluster, demands: Demands
) -> dict[str, float]:
    """Seconds of a step, as `Prediction` has them; none for a mesh that is of another kind."""
    if mesh.pipeline == 1 or mesh.share > 1 or mesh.shard > 1:
        return {}
    meshes = {
        "alone_s": Mesh.of(world_size=1),
        "replicas_s": Mesh.of(world_size=mesh.world_size, data=mesh.world_size, pipeline=1),
    }
    found = {}
    for name, other in meshes.items():
        fabric = Fabric(cluster=cluster, mesh=other)
        seconds = []
        for count, chain in chains.items():
            workload = Workload(chain, num_microbatches=count, fabric=fabric, demands=demands)
            option = make_draft(workload, "1f1b", (0,)).work_out()
            seconds += [option.step_s] if option.fits else []
        found[name] = min(seconds, default=0.0)
    return found
