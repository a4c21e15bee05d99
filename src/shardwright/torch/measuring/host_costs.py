"""Measures what the library itself takes for a step, an action, a unit and an operation, on toy models.

::

    toys of 2 sizes, 2 numbers of microbatches ─► processor time of steps, less a plain loop's ─► `HostCosts`
                                                                                                     │
                                                               a file beside other measured costs ◄──┘

What a toy computes is next to nothing, so that the rest is the library. It runs on the ranks of the run, in
contexts of its own, by a plan that is given.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from shardwright import __version__
from shardwright.cluster import Cluster, HostCosts
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.model_graph import model_fingerprint
from shardwright.plan import MeshPlan, ModelIdentity, Plan, SchedulePlan, StagePlan
from shardwright.run.context import Context, Links, ProcessGroups, RankWatch, Reports, context, set_context
from shardwright.run.machine import CacheFile, machine_key
from shardwright.torch.batch.batch import Batch
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.randomness import get_state, python_random_kept, set_state

log = logging.getLogger(__name__)

_WIDTH = 8
_MORE_UNITS, _OPERATIONS = 8, 16
_ROUNDS = 5
_LOOPS = 8


@dataclass(frozen=True, slots=True)
class Toy:
    """A toy."""

    units: int
    operations: int
    microbatches: int


def fitted(toys: Mapping[Toy, float]) -> HostCosts:
    """The costs that explain the seconds of steps of toys best, relative to each; none is negative.

    >>> round(fitted({Toy(2, 0, 2): 3e-3, Toy(2, 0, 6): 7e-3}).action_s, 9)
    0.0005
    """
    rows = [
        (1, 2 * toy.microbatches, toy.microbatches * toy.units, toy.microbatches * toy.operations)
        for toy in toys
    ]
    seconds = np.array([max(each, 1e-6) for each in toys.values()])
    matrix = np.array(rows, dtype=float) / seconds[:, None]
    # What all toys have alike cannot be told from an action.
    columns = [0, 1]
    columns += [2] if len({toy.units for toy in toys}) > 1 else []
    columns += [3] if len({toy.operations for toy in toys}) > 1 else []
    found = np.zeros(4)
    while columns:
        some, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(seconds)), rcond=None)
        if (some >= 0).all():
            found[columns] = some
            break
        columns.remove(columns[int(np.argmin(some))])
    step_s, action_s, unit_s, operation_s = (float(each) for each in found)
    return HostCosts(step_s=step_s, action_s=action_s, unit_s=unit_s, operation_s=operation_s)


def with_host_costs(run: Context, cluster: Cluster) -> Cluster:
    """The machines with what the library takes on them; collective over all ranks."""
    if run.config.profile == "estimated" or run.device.type != "cpu" or run.mesh.share > 1:
        return cluster
    whole = not run.mesh.spreads_model
    loop = _costs(run if whole else _alone(run))
    return replace(cluster, loop_costs=loop, host_costs=None if whole else _costs(run))


def _costs(run: Context) -> HostCosts:
    """Those of a run: as an earlier one has measured them, at today's speed, or as they are now."""
    mesh, world = run.mesh, context()
    replay = "" if run.config.replay == "auto" else f"-{run.config.replay}"
    name = f"host/{machine_key(run)}-{mesh.pipeline}x{mesh.data}x{mesh.shard}{replay}"
    cache = CacheFile(name, HostCosts, what="costs of the library")
    loop_s = statistics.fmean(world.from_all_ranks(_loop_s(run.device)))
    known = world.from_first_rank(lambda: {key: asdict(each) for key, each in cache.read().items()})
    in_loops = known.get(__version__)
    if in_loops is None:
        found = world.from_all_ranks(asdict(_measured(run)))
        in_loops = {name: statistics.fmean(each[name] for each in found) / loop_s for name in found[0]}
        if world.rank == 0:
            cache.write({__version__: HostCosts(**in_loops)})
    return HostCosts(**{name: each * loop_s for name, each in in_loops.items()})


def _loop_s(device: torch.device) -> float:
    """Processor time of a plain loop over a toy, by which costs of another day are scaled."""
    generators = get_state(device)
    try:
        with torch.enable_grad():
            layers, part = _Layers(_MORE_UNITS, device), torch.ones(1, _WIDTH, device=device)
            taken = [_seconds(lambda: layers(part, 1).mean().backward()) for _ in range(_LOOPS)]
    finally:
        set_state(generators, device)
    return statistics.quantiles(taken, n=4)[0]


def _alone(run: Context) -> Context:
    """A run of this rank alone."""
    nobody: dict[str, Any] = {"groups": ProcessGroups(), "links": Links(), "watch": RankWatch()}
    return replace(run, mesh=Mesh.of(world_size=1), rank=0, **nobody)


def _measured(run: Context) -> HostCosts:
    """The costs on this rank; collective over the ranks of the run."""
    units = run.mesh.pipeline
    toys = [Toy(units, 0, 2), Toy(units, 0, 6)]
    if run.mesh.spreads_model:
        toys += [Toy(units + _MORE_UNITS, 0, 4), Toy(units, _OPERATIONS, 4)]
    generators = get_state(run.device)
    try:
        with python_random_kept(), torch.enable_grad(), ExitStack() as stack:
            steps: dict[Toy, _Steps] = {}
            for units in dict.fromkeys(toy.units for toy in toys):
                alike = [toy for toy in toys if toy.units == units]
                steps |= stack.enter_context(_steps_of(alike, run))
            taken: dict[Toy, list[float]] = {toy: [] for toy in toys}
            for _ in range(_ROUNDS):
                for toy, each in steps.items():
                    taken[toy].append(each.seconds())
    finally:
        set_state(generators, run.device)
    return fitted({toy: statistics.quantiles(seconds, n=4)[0] for toy, seconds in taken.items()})


def _seconds(call: Callable[[], object]) -> float:
    """Processor time: by the clock, ranks wait for one another, and for others on their cores."""
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


@contextmanager
def _steps_of(toys: Sequence[Toy], run: Context) -> Iterator[dict[Toy, "_Steps"]]:
    """The steps of toys with one number of layers, in a context of their own, each after a first one."""
    from shardwright.torch.model.distributed_model import DistributedModel  # it makes planners

    own = replace(run, reporter=cast(Reports, _Silent()), model=None, optimizers=[], cleanup=ExitStack())
    _adapt(own, toys[0])
    with own.cleanup:
        with _in_force(own):
            model = DistributedModel(_Layers(toys[0].units, own.device))
        found = {toy: _Steps(toy, model, own) for toy in toys}
        for steps in found.values():
            steps.seconds()
        yield found


def _adapt(own: Context, toy: Toy) -> None:
    """Gives a context of toys the settings and the plan of one of them."""
    own.config = Config.merge(
        {
            "microbatches": toy.microbatches,
            "run_dir": "off",
            "replay": own.config.replay,
        }
    )
    own.plan = _plan_of(toy, own.mesh) if own.mesh.spreads_model else None


class _Steps:
    """Steps of a toy: by the library, and in a loop over microbatches."""

    def __init__(self, toy: Toy, model: Any, own: Context):
        self._toy, self._model, self._own = toy, model, own
        self._batch = torch.ones(toy.microbatches, _WIDTH, device=own.device)
        self._layers = _Layers(toy.units, own.device)
        self._behind_each = toy.operations // toy.units

    def seconds(self) -> float:
        """Seconds of a step beside computing, of which each rank has its share."""
        _adapt(self._own, self._toy)
        with _in_force(self._own):
            ours_s = _seconds(lambda: self._model._engine.run(self._function, Batch(((self._batch,), {}))))
        return ours_s - _seconds(self._plain) / self._own.mesh.pipeline

    def _plain(self) -> None:
        for part in self._batch.chunk(self._toy.microbatches):
            self._layers(part, self._behind_each).mean().backward()

    def _function(self, batch: Tensor) -> Tensor:
        loss: Tensor = self._model(batch, self._behind_each).mean()
        self._model.backward(loss)
        return loss


@contextmanager
def _in_force(own: Context) -> Iterator[None]:
    before = context()
    set_context(own)
    try:
        yield
    finally:
        set_context(before)


class _Layers(nn.Module):
    """The module of a toy: layers, with operations behind each."""

    def __init__(self, units: int, device: torch.device):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(units))

    def forward(self, x: Tensor, behind_each: int) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(behind_each):
                x = x * 1.0
        return x


@cache
def _plan_of(toy: Toy, mesh: Mesh) -> Plan:
    """As many layers on each rank."""
    units = toy.units
    names = tuple(f"layers.{number}" for number in range(units))
    module = _Layers(units, torch.device("meta"))
    return Plan(
        model=ModelIdentity(
            fingerprint=model_fingerprint(UnitMap.of(module, names).specs),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            units=names,
        ),
        mesh=MeshPlan.of(mesh),
        schedule=SchedulePlan(kind="1f1b", microbatches=toy.microbatches),
        stages=tuple(
            StagePlan(
                rank=rank,
                units=tuple(name for n, name in enumerate(names) if n * mesh.pipeline // units == rank),
            )
            for rank in range(mesh.pipeline)
        ),
    )


class _Silent:
    """Takes the place of `Reports` for steps that nobody is told of."""

    num_steps = 0
    calls_steps = True
    folder = None
    draws_next_step = False

    def phase(self, text: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def plan_made(self, plan: Plan) -> None:
        pass

    def close(self) -> None:
        pass
