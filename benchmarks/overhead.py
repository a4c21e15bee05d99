"""Section E: what the runtime takes on top of the work, on units that hardly do any."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from duel import Times, alternate, clocked
from models import Layered, Task, empty_units, even_stages
from peer_pipelining import Peer
from shardwright.schedule import Kind
from shardwright.testing import run_ranks
from shardwright_side import Ours

__all__ = ["Overhead", "measure_overhead", "overhead_table"]

_RANKS, _MICROBATCHES = 2, 8
_ROUNDS = 50
_UNITS = (1, 4, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Microseconds, medians over microbatches and rounds, and means of these over ranks.

    Attributes:
        units: units on each rank.
        forward_us: an ``F`` action, waiting left out.
        backward_us: a ``B`` action, waiting left out.
        plain_forward_us: the same units and the loss called in a plain loop.
        plain_backward_us: their backward.
        between_us: from the end of one action to the start of the next: sends, and receives that are posted.
        times: whole steps of both sides.
    """

    units: int
    forward_us: float
    backward_us: float
    plain_forward_us: float
    plain_backward_us: float
    between_us: float
    times: Mapping[str, Times]


def measure_overhead(*, quick: bool) -> list[Overhead]:
    """Runs 1F1B on two ranks, on both sides, with more and more units."""
    rounds = 3 if quick else _ROUNDS
    return [
        run_ranks(_measure, _RANKS, empty_units(_RANKS * units), rounds, timeout_s=120)[0] for units in _UNITS
    ]


def overhead_table(found: Sequence[Overhead]) -> list[list[str]]:
    """A row for each number of units: actions, then whole steps."""
    rows = [["units a stage", "F", "plain", "B", "plain", "between", f"step, m = {_MICROBATCHES}", "peer"]]
    for each in found:
        us = (
            each.forward_us,
            each.plain_forward_us,
            each.backward_us,
            each.plain_backward_us,
            each.between_us,
        )
        steps = (f"{each.times[side].median_s * 1e3:.2f} ms" for side in ("ours", "peer"))
        rows.append([str(each.units), *(f"{value:.0f} us" for value in us), *steps])
    return rows


def _measure(task: Task, rounds: int) -> Overhead:
    model = task.build()
    stages = even_stages(model, _RANKS)
    peer = Peer(task, model, stages, kind="1F1B", microbatches=_MICROBATCHES)
    ours = Ours(task, model, {"pipeline": "1f1b", "microbatches": _MICROBATCHES}, stages=stages)
    actions: dict[Kind, list[float]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
    between: list[float] = []

    def step() -> None:
        ours.step()
        events = ours.executor.row.events
        for action, start, end, waited in events:
            actions[action.kind].append((end - start - waited) * 1e6)
        between.extend((b[1] - a[2]) * 1e6 for a, b in pairwise(events))

    contestants = {"peer": lambda: clocked(peer.step), "ours": lambda: clocked(step)}
    times = alternate(contestants, rounds=rounds, warm_up=3)
    plain = _plain(task, model.get_submodule("layers")[: len(stages[0])], rounds)
    mine = [statistics.median(v) for v in (actions[Kind.FORWARD], actions[Kind.BACKWARD], *plain, between)]
    gathered: list[list[float]] = [[]] * _RANKS
    dist.all_gather_object(gathered, mine)
    forward, backward, plain_forward, plain_backward, gap = map(statistics.fmean, zip(*gathered, strict=True))
    return Overhead(
        units=len(stages[0]),
        forward_us=forward,
        backward_us=backward,
        plain_forward_us=plain_forward,
        plain_backward_us=plain_backward,
        between_us=gap,
        times=times,
    )


def _plain(task: Task, layers: torch.nn.ModuleList, rounds: int) -> tuple[list[float], list[float]]:
    """Forward and backward of one stage's layers without any library; half of the stages have the loss."""
    inputs, targets = (tensor[:1] for tensor in task.batch())
    model = Layered(list(layers))
    forwards, backwards = [], []
    for _ in range(rounds * _MICROBATCHES):
        x = inputs.clone().requires_grad_(dist.get_rank() > 0)
        forward_us, y = _in_us(lambda x=x: _loss(task, model(x), targets))
        backward_us, _ = _in_us(lambda y=y: torch.autograd.backward(y, torch.ones_like(y)))
        forwards.append(forward_us)
        backwards.append(backward_us)
    return forwards, backwards


def _loss(task: Task, y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return task.loss(y, targets) if dist.get_rank() == _RANKS - 1 else y


def _in_us(run: Callable[[], torch.Tensor | None]) -> tuple[float, torch.Tensor | None]:
    start = time.perf_counter()
    found = run()
    return (time.perf_counter() - start) * 1e6, found
