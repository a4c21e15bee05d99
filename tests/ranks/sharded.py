"""A model trained with shared parameters, side by side with what a plain loop gives."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw

VOCABULARY = 37
BATCH = 8
QUIET = {"run_dir": "off", "profile": "estimated", "sdp_param_persistence_threshold": 20}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embeds, computes, and reads the embedding a second time, past the module that has it."""

    def __init__(self, width: int = 16, blocks: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.mix = nn.Linear(width, 3, bias=False)  # fewer rows than ranks
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.mix(x).sum(-1, keepdim=True)
        return F.linear(x, self.embedding.weight)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets, the same everywhere."""
    generator = torch.Generator().manual_seed(1)

    def tokens() -> Tensor:
        return torch.randint(0, VOCABULARY, (BATCH, 5), generator=generator)

    return [(tokens(), tokens()) for _ in range(steps)]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A step with that loss."""
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with its own learning rate for biases, some of which are shared and some not."""
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": others, "lr": 1e-2}, {"params": biases, "lr": 2e-2}]
    return getattr(torch.optim, name)(groups)


def plain_training(optimizer: str = "AdamW", *, clip: float = 0.0, steps: int = 3, accumulate: int = 1):
    """(losses, norms, state) of one process."""
    torch.manual_seed(0)
    model = Net().double()
    updates = optimizer_of(optimizer, model)
    losses, norms = [], []
    for index, (x, y) in enumerate(batches(steps)):
        if index % accumulate == 0:
            updates.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        losses.append(loss.item())
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if index % accumulate == accumulate - 1:
            updates.step()
    return losses, norms, model.state_dict()


def on_hosts(ranks_per_host: int) -> None:
    """Has ranks of this machine do as if they were on several hosts, with rows that come one by one."""
    import shardwright.comm.collectives.connect as connect

    rank = int(os.environ["RANK"])
    if ranks_per_host < 4:
        import shardwright.torch.sharding.parcel as parcel

        parcel._SIZE = 1
    connect.this_host = lambda: f"host {rank // ranks_per_host}"


def wish(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, and what the planner would choose by itself: `every` microbatch, `bucket` of elements."""
    from shardwright.planner.drafts import Sharing
    from shardwright.torch.replicas import replicas

    settings = dict(settings)
    if (every := settings.pop("every", None)) is not None:
        ways = Sharing.ways
        chosen = lambda *all, **more: [ways(*all, **more)[-1 if every else 0]]  # noqa: E731
        Sharing.ways = chosen  # type: ignore[method-assign]
        replicas.Replicas._reduces_in_every_backward = lambda self, members: every  # type: ignore[method-assign]
    if (bucket := settings.pop("bucket", None)) is not None:
        replicas.SHARDED_BUCKET_BYTES = 4 * bucket
    return settings


def sharded_training(
    settings: dict[str, Any],
    optimizer: str = "AdamW",
    *,
    ranks_per_host: int = 4,
    clip: float = 0.0,
    steps: int = 3,
    accumulate: int = 1,
):
    """(losses, norms, state, names of sharded parameters) of a rank."""
    on_hosts(ranks_per_host)
    sw.init({**QUIET, **wish(settings)})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    updates = sw.DistributedOptimizer(optimizer_of(optimizer, model))

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    losses, norms = [], []
    for index, (x, y) in enumerate(batches(steps)):
        if index % accumulate == 0:
            updates.zero_grad()
        own_x, own_y = x.chunk(sw.dp_size())[sw.dp_rank()], y.chunk(sw.dp_size())[sw.dp_rank()]
        loss = train(model, own_x, own_y).reduce_mean().detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if index % accumulate == accumulate - 1:
            updates.step()
    names = (
        []
        if model.replicas.sharding is None
        else [s.name for s in model.replicas.sharding.parameters.values()]
    )
    return losses, norms, model.state_dict(), names
