"""The number and the sizes of microbatches never change the training, whatever a loss is over its samples."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

D = torch.float64
CLASSES, WIDTH, LENGTH = 7, 16, 5
QUIET = {"profile": "estimated", "run_dir": "off"}
KINDS: dict[str, dict[str, Any]] = {
    "stages": {},
    "replicas": {"pipeline_parallel_degree": 1},
    "shards": {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    },
    "parts of layers": {"tensor_parallel_degree": 2},
}
WEIGHTS = torch.linspace(0.5, 2, CLASSES, dtype=D)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _masked(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    mask = y != -100
    return (_each(z, y) * mask).sum() / mask.sum().clamp(min=1)


def _weighed(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    weights = 5.0 + y.clamp(min=0)  # their sum is more than there are samples
    return (_each(z, y) * weights).sum() / weights.sum()


def _connected(z: Tensor, y: Tensor, n: Tensor, lengths: Tensor) -> Tensor:
    frames, labels = torch.full((len(z),), LENGTH), y.clamp(min=1)[:, :2]
    log_p = z.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(log_p, labels, frames, lengths, reduction="sum", zero_infinity=True)


def _connected_by_lengths(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    lengths = (y > 2).sum(1).clamp(1, 2)
    return _connected(z, y, n, lengths) / lengths.sum()


def _by_samples(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
    mask = y != -100
    return (_each(z, y) * mask).sum(1).sum() / mask.sum().clamp(min=1)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda z, y, n: _each(z, y).sum() + z.square().sum(),
    "mean": lambda z, y, n: z.square().mean(),
    "sum over the samples": lambda z, y, n: z.square().sum() / len(z),
    "sum over the labels of the batch": lambda z, y, n: _each(z, y).sum() / n,
    "ignored labels": lambda z, y, n: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "masked": _masked,
    "large weights": _weighed,
    "masked, by samples": _by_samples,
    "connections": lambda z, y, n: _connected(z, y, n, torch.full((len(z),), 2)),
    "connections by their lengths": _connected_by_lengths,
    "smoothed": lambda z, y, n: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.002),
    "picked rows": lambda z, y, n: z[y > 2].square().mean(),
    "weights of classes": lambda z, y, n: F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=WEIGHTS),
}


def _batch(samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, CLASSES, (samples, LENGTH), generator=g) for _ in range(2))
    y[0, 2:] = -100
    y[4:7] = -100  # all labels of a microbatch
    return x, y, (y != -100).sum()


def _mine(*tensors: Tensor) -> list[Tensor]:
    return [tensor.chunk(sw.rdp_size())[sw.rdp_rank()] for tensor in tensors]


def _largest(pairs: Any) -> float:
    """Relative to the largest entry, over all ranks."""
    found = max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs), default=0.0)
    told = torch.tensor(found, dtype=D)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _trained(kind: str, samples: int, microbatches: int, names: tuple[str, ...]) -> dict[str, Any]:
    """How losses and gradients differ from those of one process with the whole batch."""
    sw.init({**QUIET, "microbatches": microbatches, **KINDS[kind]})
    torch.manual_seed(0)
    net = Net().to(D)
    plain = copy.deepcopy(net)
    model = sw.DistributedModel(net)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.002))
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.002)
    differences = {}
    for name in names:
        loss_of = LOSSES[name]

        @sw.step
        def train(model: Any, x: Tensor, y: Tensor, n: Tensor, loss_of: Any = loss_of) -> Any:
            loss = loss_of(model(x), y, n)
            model.backward(loss)
            return {"loss": loss, "detached": loss.detach()}

        for seed in range(2):
            x, y, n = _batch(samples, seed)
            # The second time gradients of the first are still there.
            if not seed:
                optimizer.zero_grad()
                plain_optimizer.zero_grad()
            out = train(model, *_mine(x, y), n)
            want = loss_of(plain(x), y, n)
            want.backward()
            if sw.rdp_size() == 1:
                for told in out.values():
                    assert told.reduce_mean().item() == pytest.approx(want.item(), rel=1e-9), name
        optimizer.step()
        plain_optimizer.step()
        state, own = model.state_dict(), plain.state_dict()
        worst = _largest((state[key], own[key]) for key in own)
        if worst > 1e-10:
            differences[name] = worst
    return differences


@pytest.mark.parametrize(
    ("kind", "samples"),
    [("stages", 14), ("replicas", 16), ("shards", 14), ("parts of layers", 16)],
)
def test_gradients_are_those_of_the_whole_batch(kind: str, samples: int) -> None:
    """A sum got 1/m of its gradient, uneven microbatches and those with ignored labels counted alike."""
    assert run_ranks(_trained, 2, kind, samples, 4, tuple(LOSSES)) == [{}, {}]


def _by_weights(case: str) -> float:
    sw.init({**QUIET, "microbatches": 2})
    torch.manual_seed(0)
    plain = nn.Linear(3, 1, bias=False, dtype=D)
    samples = 2 if case == "one sample" else 4
    x, weights = torch.randn(samples, LENGTH, 3, dtype=D), torch.full((samples, LENGTH), 2.5, dtype=D)

    def loss_of(net: Any, x: Tensor, weights: Tensor) -> Tensor:
        squares = net(x).squeeze(-1).square()
        if case == "flattened":
            squares, weights = squares.view(-1), weights.view(-1)
        return (squares * weights).sum() / weights.sum()

    (want,) = torch.autograd.grad(loss_of(plain, x, weights), plain.weight)
    model = sw.DistributedModel(plain)
    sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    @sw.step
    def train(model: Any, x: Tensor, weights: Tensor) -> Tensor:
        loss = loss_of(model, x, weights)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    if case == "evaluated before":
        with torch.no_grad():
            train(model, x, weights)
    train(model, x, weights)
    assert plain.weight.grad is not None
    return _largest([(plain.weight.grad, want)])


@pytest.mark.parametrize("case", ["one sample", "flattened", "evaluated before"])
def test_weights_larger_than_one_are_counted_in_the_first_microbatch(case: str) -> None:
    """Weights of more than there are numbers passed for those of the whole batch: twice the gradient."""
    assert max(run_ranks(_by_weights, 1, case)) < 1e-12


def _refused(kind: str) -> None:
    sw.init({**QUIET, "microbatches": 4, **KINDS[kind]})
    model = sw.DistributedModel(Net().to(D))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        z = model(x)[:, 0]
        loss = F.cross_entropy(z @ z.T, torch.arange(len(z)))
        model.backward(loss)
        return loss

    train(model, _batch(16, 0)[0])


@pytest.mark.parametrize("kind", ["stages", "replicas"])
def test_a_loss_over_pairs_of_samples_is_refused_where_the_batch_is_cut(kind: str) -> None:
    with pytest.raises(RanksFailedError, match=r"it compares samples .* Cut into 4 microbatches"):
        run_ranks(_refused, 2, kind)


def _divided_by_a_running_number() -> None:
    sw.init({**QUIET, "microbatches": 4, "pipeline_parallel_degree": 1})
    model = sw.DistributedModel(Net().to(D))
    norm = 1e6

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        nonlocal norm
        norm = 0.9 * norm + 0.1 * len(x)
        loss = model(x).square().sum() / norm
        model.backward(loss)
        return loss

    train(model, _batch(16, 0)[0])


def test_a_sum_divided_by_another_number_in_each_microbatch_is_refused() -> None:
    """The running normaliser of RetinaNet made the gradient that of a sum: m times that of one process."""
    words = r"it divides a sum by 9\S+ in one microbatch, by 8\S+ in another\. Cut into 4 microbatches"
    with pytest.raises(RanksFailedError, match=words):
        run_ranks(_divided_by_a_running_number, 2)


def _divided_by_a_number_of_its_weights(kind: str) -> None:
    sw.init({**QUIET, "microbatches": 4, **KINDS[kind]})
    model = sw.DistributedModel(Net().to(D))

    @sw.step
    def train(model: Any, x: Tensor, weights: Tensor) -> Tensor:
        losses = model(x).square().mean((1, 2))
        loss = (losses * weights).sum() / weights.sum().item()
        model.backward(loss)
        return loss

    train(model, _batch(16, 0)[0], torch.linspace(2, 5, 16, dtype=D))


@pytest.mark.parametrize("kind", ["stages", "replicas"])
def test_a_sum_divided_by_a_number_that_is_read_is_refused_where_it_differs(kind: str) -> None:
    """Over stages it was taken for a sum, with as many times the gradient as there are microbatches."""
    with pytest.raises(
        RanksFailedError, match=r"it divides a sum by \S+ in one microbatch, by \S+ in another"
    ):
        run_ranks(_divided_by_a_number_of_its_weights, 2, kind)


def _counted_over_uneven_replicas() -> float:
    sw.init({**QUIET, "pipeline_parallel_degree": 1})
    torch.manual_seed(0)
    net = nn.Linear(6, 3, dtype=D)
    x, y = torch.randn(10, 6, dtype=D), torch.tensor([0, -100, 2, -100, 0, 1, 2, 0, 1, -100])
    wanted = copy.deepcopy(net)
    F.cross_entropy(wanted(x), y).backward()
    model = sw.DistributedModel(net)

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.cross_entropy(model(x), y))

    own = slice(0, 3) if sw.rdp_rank() == 0 else slice(3, 10)
    train(model, x[own], y[own])
    assert net.weight.grad is not None
    return _largest([(net.weight.grad, wanted.weight.grad)])


def test_labels_count_alike_over_replicas_with_other_numbers_of_samples() -> None:
    """Each replica's labels were divided by its own samples: a smaller last batch counted for more."""
    assert max(run_ranks(_counted_over_uneven_replicas, 2)) < 1e-12


def _taken_for_itself() -> float:
    sw.init({**QUIET, "microbatches": 4})
    torch.manual_seed(0)
    net = Net().to(D)
    plain = copy.deepcopy(net)
    model = sw.DistributedModel(net)

    def loss_of(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, 0] @ z[:, 0].T, torch.arange(len(z)))

    @sw.step(loss_reduction="mean")
    def train(model: Any, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        model.backward(loss)
        return loss

    x = _batch(16, 0)[0]
    train(model, x)
    for part in x.chunk(4):
        (loss_of(plain(part)) / 4).backward()
    own = dict(plain.named_parameters())
    return _largest((p.grad, own[name].grad) for name, p in model.local_named_parameters())


def test_a_script_may_take_each_microbatch_for_itself() -> None:
    assert max(run_ranks(_taken_for_itself, 2)) < 1e-10


def _above_the_mean(z: Tensor, reward: Tensor) -> Tensor:
    losses = (z[:, 0] - reward).square()
    return losses[losses > losses.mean().detach()].mean()


def _mixed(z: Tensor, reward: Tensor) -> Tensor:
    return (z[:, 0] - 0.3 * reward - 0.7 * reward[torch.randperm(len(reward))]).square().mean()


def _nearest(z: Tensor, reward: Tensor) -> Tensor:
    with torch.no_grad():
        nearest = torch.cdist(z, z).fill_diagonal_(9e9).argmin(1)
    return (z - z[nearest] - reward[:, None]).square().mean()


OF_DATA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean() over the samples of its data": lambda z, reward: (
        -(z[:, 0] * (reward - reward.mean()) / reward.std()).mean()
    ),
    "mean() over the samples of its data ": _above_the_mean,
    "another order of its samples": _mixed,
    "another order of its samples ": _nearest,
}


def _with_neighbours(z: Tensor, reward: Tensor) -> Tensor:
    return (z[:, 0] - reward).square().mean() + (z[1:] - z[:-1]).abs().mean()


def _centred(z: Tensor, reward: Tensor) -> Tensor:
    return (z[:, 0] - reward).square().mean() + (z - z.mean(0)).square().mean().sqrt()


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Slice of single samples": _with_neighbours,
    "rows and values of the whole microbatch together": _centred,
}


def _by_positives(z: Tensor, reward: Tensor) -> Tensor:
    return z.square().sum() / (reward > 9).sum().clamp(min=1)


def _told(kind: str, losses: str, words: str) -> dict[str, list[str]]:
    sw.init({**QUIET, "microbatches": 4, **KINDS[kind]})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    told: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("shardwright").addHandler(Heard())
    found = {}
    for name, loss_of in {"count": {"count": _by_positives}, "data": OF_DATA, "unknown": UNKNOWN}[
        losses
    ].items():

        def train(model: Any, x: Tensor, reward: Tensor, loss_of: Any = loss_of) -> Tensor:
            loss: Tensor = loss_of(model(x), reward)
            model.backward(loss)
            return loss

        step = sw.step(train)
        for _ in range(2):
            step(model, torch.randn(12, 3), torch.randn(12))
        every: list[list[str]] = [[] for _ in range(sw.size())]
        dist.all_gather_object(every, [line for line in told if words in line])
        found[name] = [line for lines in every for line in lines]
        told.clear()
    return found


@pytest.mark.parametrize("kind", ["stages", "replicas"])
def test_a_loss_with_a_statistic_of_the_data_is_told_of_once(kind: str) -> None:
    """Each microbatch normalised its rewards by its own mean, without a word."""
    first, *_ = run_ranks(_told, 2, kind, "data", "takes its own")
    for name, lines in first.items():
        (line,) = lines
        assert name.strip() in line
        assert "each of 4 microbatches takes its own" in line
        assert "before the step function" in line


@pytest.mark.parametrize("kind", ["stages", "replicas"])
def test_a_term_beside_others_of_which_nothing_is_known_is_told_of_once(kind: str) -> None:
    """Alone it was told of; beside a mean it was that of each microbatch without a word."""
    first, *_ = run_ranks(_told, 2, kind, "unknown", "set microbatches to 1")
    for name, lines in first.items():
        (line,) = lines
        assert f"has a term that is computed by {name}, which shows no sum and no mean" in line


@pytest.mark.parametrize("kind", ["stages", "replicas"])
def test_a_count_that_is_none_and_kept_at_one_is_pointed_out(kind: str) -> None:
    """A microbatch without positives counted as if it had one (RetinaNet's loss): 22 % off, silently."""
    first, *_ = run_ranks(_told, 2, kind, "count", "kept at 1 or more")
    assert 1 <= len(first["count"]) <= 2  # on the ranks that see it
    assert "before the step function, and pass the number" in first["count"][0]
