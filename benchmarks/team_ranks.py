"""What runs in the processes of a `team.Team`."""

import contextlib
import os
import pickle
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from contestant import Contestant, contestant
from duel import Run, clocked
from models import Task
from shardwright.testing import run_ranks
from shardwright_side import Ours

__all__ = ["Entry", "main"]

_LONGEST_S = 3600.0
_STRETCH_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a contestant says when it is ready.

    Attributes:
        seconds: it took.
        foreign: cores that others kept busy meanwhile.
        chosen: what the library chose; empty for others.
        predicted_s: what its plan predicts for a step.
    """

    seconds: float
    foreign: float
    chosen: str = ""
    predicted_s: float | None = None


def _serve(address: str, name: str, task: Task, microbatches: int) -> None:
    """Runs on each rank until the race hangs up."""
    race = Client(address, family="AF_UNIX") if dist.get_rank() == 0 else None
    current: list[Contestant] = []
    last_s = _STRETCH_S

    def enter() -> None:
        current[:] = [contestant(name, task, microbatches=microbatches)]

    while (command := _next(race)) != "end":
        if command == "enter":
            # A mapping: the ranks' classes are copies of the race's.
            answer: Any = asdict(_entry(clocked(enter), current[0]))
            last_s = _STRETCH_S
        elif command == "run":
            answer = _train(current[0], last_s)
            last_s = answer[0]
        else:
            answer = _known_loss(current[0])
        if race is not None:
            race.send(answer)


def _train(found: Contestant, last_s: float) -> Run:
    """A step's time while it trains: one step follows another, so the first after a rest does not count.

    Args:
        found: who trains.
        last_s: what its step took the last time, the same on all ranks; short ones are taken together.
    """
    found.step()
    return clocked(found.step, times=max(1, round(_STRETCH_S / max(last_s, 1e-3))))


def _next(race: Connection | None) -> str:
    command = ["end"]
    if race is not None:
        with contextlib.suppress(EOFError):
            command = [race.recv()]
    dist.broadcast_object_list(command, src=0)
    return command[0]


def _entry(run: Run, found: Contestant) -> Entry:
    seconds, foreign = run
    if not isinstance(found, Ours):
        return Entry(seconds=seconds, foreign=foreign)
    plan = found.plan
    sizes = "+".join(str(len(stage.units)) for stage in plan.stages)
    return Entry(
        seconds=seconds,
        foreign=foreign,
        chosen=f"{plan.schedule.kind}, units {sizes}",
        predicted_s=plan.prediction.step_s if plan.prediction else None,
    )


def _known_loss(found: Contestant) -> float:
    losses: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, found.loss)
    return next(loss for loss in losses if loss is not None)


def main(address: str, spec: str) -> None:
    """Starts them.

    Args:
        address: path of the race's socket.
        spec: path of a file that describes the team.
    """
    name, task, ranks, microbatches = pickle.loads(Path(spec).read_bytes())
    run_ranks(_serve, ranks, address, name, task, microbatches, timeout_s=_LONGEST_S)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(*sys.argv[1:])
