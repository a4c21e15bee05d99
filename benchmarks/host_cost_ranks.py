"""What each rank of `host_cost.py` does: steps of its contestants, when they are asked for.

::

    ours     the library                      DDP, FSDP2     of torch, on this rank's rows
    plain    a loop over microbatches,        1F1B, Interleaved1F1B
             on the first rank                               of torch.distributed.pipelining

`host_cost_race` starts the ranks.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from duel import clocked
from host_cost_models import Model, model_of
from host_cost_profile import profile_step
from models import even_stages
from peer_pipelining import KINDS, Peer

__all__ = ["Row", "Turn", "serve", "step_of"]

_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "1F1B": {"pipeline": "1f1b", "virtual_stages": 1},
    "Interleaved1F1B": {"pipeline": "interleaved_1f1b", "virtual_stages": 2},
    "replicas": {},
    "shards": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is measured side by side.

    Attributes:
        model: its name.
        layout: ``one`` (rank), ``1F1B``, ``Interleaved1F1B``, ``replicas`` or ``shards``.
        ranks: processes of each contestant.
        microbatches: parts of a batch.
        extras: of ``clipping``, ``scheduler``, ``autocast``, ``checkpoints``.
    """

    model: str
    layout: str
    ranks: int = 2
    microbatches: int = 4
    extras: tuple[str, ...] = ()

    @property
    def rivals(self) -> tuple[str, ...]:
        """Whom ours meets."""
        if self.layout in KINDS:
            layered = model_of(self.model).is_layered and not self.extras
            return (self.layout, "plain") if layered else ("plain",)
        return {"one": ("plain",), "replicas": ("DDP",), "shards": ("FSDP2",)}[self.layout]

    @property
    def num_samples(self) -> int:
        """Rows of a rank's batch: two of a microbatch, 8 at least."""
        return max(8, 2 * self.microbatches)

    def __str__(self) -> str:
        extras = f", {', '.join(self.extras)}" if self.extras else ""
        return f"{self.model}, {self.layout} on {self.ranks}, m = {self.microbatches}{extras}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps of a contestant.

    Attributes:
        cpu_s: of each rank, the main thread's processor time of a step, the median.
        process_s: of each rank, the processor time of a step of all its threads, the mean.
        wall_s: of a step, by the clock.
        foreign: cores that others kept busy meanwhile.
        loss: of the last step, the mean of the ranks that know it.
    """

    cpu_s: tuple[float, ...]
    process_s: tuple[float, ...]
    wall_s: float
    foreign: float
    loss: float


Step = Callable[[], Tensor | None]


def step_of(name: str, row: Row) -> Step:
    """A contestant's step: gradients from zero, a batch, an update; it gives the loss where that is known."""
    model = model_of(row.model)
    if name == "ours":
        return _ours(model, row)
    if name in KINDS:
        return _pipelining(model, row)
    net = model.build()
    if "checkpoints" in row.extras:
        model.checkpoint(net)
    if name == "plain":
        return _plain(model, net, row) if dist.get_rank() == 0 else lambda: None
    if name == "DDP":
        net = DistributedDataParallel(net)
    else:
        mesh = init_device_mesh("cpu", (row.ranks,))
        for block in model.blocks(net):
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return _plain(model, net, row)


def _plain(model: Model, net: nn.Module, row: Row) -> Step:
    """A loop over microbatches."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    batch = model.batch(row.num_samples, dist.get_rank() if row.layout in ("replicas", "shards") else 0)
    num = row.microbatches
    chunks = {name: tensor.chunk(num) for name, tensor in batch.items()}
    pieces = [{name: each[index] for name, each in chunks.items()} for index in range(num)]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for piece in pieces:
            with _autocast(row):
                loss = model.loss(net, piece)
            (loss / num).backward()
            losses.append(loss.detach())
        _end(row, net, optimizer, scheduler)
        return torch.stack(losses).mean()

    return step


def _pipelining(model: Model, row: Row) -> Step:
    net = model.build()
    stages = even_stages(net, row.ranks * KINDS[row.layout])  # type: ignore[arg-type]
    task = model.task(row.num_samples)
    peer = Peer(task, net, stages, kind=row.layout, microbatches=row.microbatches)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for each in peer.modules.values() for p in each.parameters()], 0.01)

    def step() -> Tensor | None:
        peer.step()
        optimizer.step()
        return None if peer.loss is None else torch.tensor(peer.loss)

    return step


def _ours(model: Model, row: Row) -> Step:
    import shardwright.torch as sw

    settings: dict[str, Any] = {"microbatches": row.microbatches, **_LAYOUTS[row.layout]}
    if row.layout in KINDS:
        settings["pipeline_parallel_degree"] = row.ranks
    elif row.ranks > 1:
        settings["data_parallel_degree"] = row.ranks
        settings["sharded_data_parallel_degree"] = row.ranks if row.layout == "shards" else 1
    sw.init({"run_dir": "off", "log_interval": 10**6, "profile": "estimated", **settings})
    net = model.build()
    if "checkpoints" in row.extras:
        model.checkpoint(net)
    wrapped = sw.DistributedModel(net)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), 0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    batch = model.batch(row.num_samples, dist.get_rank() if row.layout in ("replicas", "shards") else 0)

    @sw.step
    def train(model_: Any, **given: Tensor) -> Tensor:
        with _autocast(row):
            loss = model.loss(model_, given)
        model_.backward(loss)
        return loss

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = train(wrapped, **batch).reduce_mean()
        _end(row, wrapped, optimizer, scheduler)
        return loss

    return step


def _autocast(row: Row) -> contextlib.AbstractContextManager[Any]:
    if "autocast" in row.extras:
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _end(row: Row, net: Any, optimizer: Any, scheduler: Any) -> None:
    if "clipping" in row.extras:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if "scheduler" in row.extras:
        scheduler.step()


# ---- turns


def take_turn(step: Step, num_steps: int) -> Turn:
    """Some steps, after one that doesn't count, because it follows a rest; collective."""
    step()
    times, losses = [], []

    def one() -> None:
        begin_s = time.thread_time()
        losses[:] = [step()]
        times.append(time.thread_time() - begin_s)

    before_s = time.process_time()
    wall_s, foreign = clocked(one, times=num_steps)
    process_s = (time.process_time() - before_s) / num_steps
    mine = statistics.median(times), process_s, None if losses[0] is None else float(losses[0].detach())
    gathered: list[tuple[float, float, float | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    known = [loss for *_, loss in gathered if loss is not None]
    return Turn(
        cpu_s=tuple(cpu_s for cpu_s, *_ in gathered),
        process_s=tuple(process_s for _, process_s, _ in gathered),
        wall_s=wall_s,
        foreign=foreign,
        loss=statistics.fmean(known),
    )


def serve(address: str, row: Row, names: tuple[str, ...]) -> None:
    """Runs on each rank: builds the contestants, and takes turns until the race hangs up."""
    race = Client(address, family="AF_UNIX") if dist.get_rank() == 0 else None
    steps = {name: step_of(name, row) for name in names}
    for what, name, number in _asked(race):
        if what == "turn":
            # A mapping: the ranks' classes are copies of the race's.
            answer: Any = asdict(take_turn(steps[name], number))
        else:
            answer = profile_step(steps[name], number)
        if race is not None:
            race.send(answer)


def _asked(race: Any) -> Iterator[tuple[str, str, int]]:
    while True:
        command: list[Any] = [None]
        if race is not None:
            with contextlib.suppress(EOFError):
                command = [race.recv()]
        dist.broadcast_object_list(command, src=0)
        if command[0] is None:
            return
        yield command[0]
