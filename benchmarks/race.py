"""One race on all ranks: contestants of both sides on one model, with one loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from duel import QUIET_CORES, Patience, Times, alternate, run_quietly
from models import Layered, Task, even_stages
from peer_pipelining import KINDS, Peer
from shardwright_side import STAGES_PER_RANK, Ours

__all__ = ["Result", "race"]

_SAME_LOSS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one contestant did.

    Attributes:
        section: letter of the section.
        task: name of what was trained.
        ranks: number of ranks.
        microbatches: parts into which a batch was split.
        side: ``peer``, ``ours`` or ``plain``.
        kind: its schedule, as the race was asked for.
        chosen: what the library chose where it was free.
        times: round by round.
        predicted_s: what the plan predicts for a step.
        profiled_with: cores that others kept busy while the library measured the model.
    """

    section: str
    task: str
    ranks: int
    microbatches: int
    side: str
    kind: str
    times: Times
    chosen: str = ""
    predicted_s: float | None = None
    profiled_with: float = 0.0


class _Contestant(Protocol):
    loss: float | None

    def step(self) -> None: ...


def race(
    section: str, task: Task, names: Sequence[str], *, microbatches: int, rounds: int, patience_s: float
) -> list[Result]:
    """Runs on every rank; the same results on each.

    Args:
        section: letter of the section.
        task: what is trained.
        names: contestants, as ``peer 1F1B``, ``ours zb_v`` (the stages are the peer's), ``ours free`` (the
            library chooses schedule and stages) or ``plain batch`` (see `Plain`).
        microbatches: parts into which a batch is split.
        rounds: how many quiet runs of each are wanted.
        patience_s: seconds that may be spent on that.
    """
    model = task.build()
    sides: dict[str, _Contestant] = {}
    profiled: dict[str, float] = {}
    patience = Patience(patience_s)

    for name in names:

        def enter(name: str = name) -> None:
            sides[name] = _contestant(name, task, model, microbatches)

        while True:
            seconds, profiled[name] = run_quietly(enter, patience)
            if not name.startswith("ours") or profiled[name] < QUIET_CORES or patience.ended:
                break
            patience.spend(seconds)
    steps = {name: side.step for name, side in sides.items()}
    times = alternate(steps, rounds=rounds, patience=patience)
    _check_losses({name: side.loss for name, side in sides.items()})
    return [
        _result(section, task, name, sides[name], times[name], microbatches, profiled[name]) for name in names
    ]


def _contestant(name: str, task: Task, model: Layered, microbatches: int) -> _Contestant:
    side, kind = name.split(" ", 1)
    num_ranks = dist.get_world_size()
    if side == "plain":
        return Plain(task, model, kind=kind, microbatches=microbatches)
    if side == "peer":
        stages = even_stages(model, num_ranks * KINDS[kind])
        return Peer(task, model, stages, kind=kind, microbatches=microbatches)
    if kind == "free":
        return Ours(task, model, {"microbatches": microbatches})
    per_rank = STAGES_PER_RANK[kind]
    settings = {"microbatches": microbatches, "pipeline": kind, "virtual_stages": per_rank}
    return Ours(task, model, settings, stages=even_stages(model, num_ranks * per_rank))


def _result(
    section: str,
    task: Task,
    name: str,
    side: _Contestant,
    times: Times,
    microbatches: int,
    profiled_with: float,
) -> Result:
    label, kind = name.split(" ", 1)
    plan = side.plan if isinstance(side, Ours) else None
    sizes = "+".join(str(len(stage.units)) for stage in plan.stages) if plan else ""
    return Result(
        section=section,
        task=task.name,
        ranks=dist.get_world_size(),
        microbatches=microbatches,
        side=label,
        kind=kind,
        times=times,
        chosen=f"{plan.schedule.kind}, units {sizes}" if plan else "",
        predicted_s=plan.prediction.step_s if plan and plan.prediction else None,
        profiled_with=profiled_with if plan else 0.0,
    )


def _check_losses(losses: dict[str, float | None]) -> None:
    """Refuses to compare the speed of different work."""
    gathered: list[dict[str, float | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, losses)
    known = {name: [g[name] for g in gathered if g[name] is not None] for name in losses}
    values = {name: found[-1] for name, found in known.items() if found}
    first = next(iter(values.values()))
    for name, value in values.items():
        if value is None or not math.isclose(value, first or 0.0, rel_tol=_SAME_LOSS):
            raise RuntimeError(f"{name} has another loss than the others: {values}")


class Plain:
    """One process with one thread and no library.

    Args:
        task: what is trained.
        model: used as it is.
        kind: ``batch``: the first rank runs the batch whole, the others rest; ``microbatches``: the same,
            piece by piece; ``crowd``: every rank runs the batch whole at the same time, so that all share
            caches and memory as the ranks of a pipeline do.
        microbatches: pieces.
    """

    def __init__(self, task: Task, model: Layered, *, kind: str, microbatches: int):
        self._task, self._model = task, model
        self._active = kind == "crowd" or dist.get_rank() == 0
        inputs, targets = task.batch()
        pieces = microbatches if kind == "microbatches" else 1
        self._pieces = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        self.loss: float | None = None

    def step(self) -> None:
        """Forward and backward of one batch."""
        if not self._active:
            return
        self._model.zero_grad(set_to_none=True)
        losses = []
        for inputs, targets in self._pieces:
            loss = self._task.loss(self._model(inputs), targets)
            (loss / len(self._pieces)).backward()
            losses.append(loss.detach())
        self.loss = float(torch.stack(losses).mean())
