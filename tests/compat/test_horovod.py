"""The small `horovod` for PyTorch, and how its names come in."""

import sys

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from smdistributed import horovod


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2).requires_grad_(False))


def _batch(rank, step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _plain():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        (sum(model(_batch(rank, step)).square().mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _trained():
    horovod.provide()
    import horovod.torch as hvd

    hvd.init()
    model = _model()
    if hvd.rank() == 1:
        nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if hvd.rank() == 0 else 5.0, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(hvd.rank(), step)).square().mean().backward()
        if step == 1:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    mine = torch.full((hvd.rank() + 1, 2), float(hvd.rank()))
    found = {
        "mean": hvd.allreduce(torch.tensor(float(hvd.rank())), name="loss").item(),
        "sum": hvd.allreduce(torch.tensor(2), op=hvd.Sum).item(),
        "largest": hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Max).item(),
        "rows": hvd.allgather(mine).tolist(),
        "object": hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1),
        "ranks": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()),
    }
    return found, [parameter.detach() for parameter in model.parameters()]


def test_ranks_train_with_all_batches_what_one_process_trains():
    expected = _plain()
    for number, (found, parameters) in enumerate(run_ranks(_trained, 2)):
        assert found == {
            "mean": 0.5,
            "sum": 4,
            "largest": 1,
            "rows": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
            "object": {"rank": 1},
            "ranks": (number, 2, number, 2),
        }
        for mine, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


def _one_layer():
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    return model, torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")


def _stepped(model, optimizer, losses):
    """Weights after a step by a closure, and what it gives."""

    def closure():
        optimizer.zero_grad()
        loss = sum((model(_batch(rank, 0).double()) - rank).square().mean() for rank in losses) / len(losses)
        loss.backward()
        return loss

    found = optimizer.step(closure)
    return [found.item(), *model.weight.flatten().tolist()]


def _scheduled_and_by_a_closure():
    horovod.provide()
    import horovod.torch as hvd

    hvd.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    optimizer = hvd.DistributedOptimizer(optimizer)
    again = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    hooks = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(hvd.rank(), step)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        again.step()
        optimizer.load_state_dict(optimizer.state_dict())
    replaced = torch.optim.SGD(model.parameters(), 0.1)
    replaced.step = print
    with pytest.raises(UsageError, match="step was replaced"):
        hvd.DistributedOptimizer(replaced)
    model_by_closure, by_closure = _one_layer()
    stepped = _stepped(model_by_closure, hvd.DistributedOptimizer(by_closure), [hvd.rank()])
    return [parameter.detach() for parameter in model.parameters()], len(hooks), stepped


def test_an_optimizer_averages_behind_a_scheduler_and_by_a_closure():
    """A scheduler that was there first hid the averaging step; LBFGS got no closure."""
    model, optimizer = _one_layer()
    expected, by_closure = _plain(), _stepped(model, optimizer, [0, 1])
    for parameters, hooks, stepped in run_ranks(_scheduled_and_by_a_closure, 2):
        assert hooks == 3
        assert stepped == pytest.approx(by_closure, rel=1e-12)
        for mine, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


def _gradients():
    """Of each collective, the gradient of a sum with weights that differ by rank; means of whole numbers."""
    horovod.provide()
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()

    def gradient(collective, *shape):
        given = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        made = collective(given)
        weights = torch.arange(1, made.numel() + 1, dtype=torch.float64).reshape(made.shape)
        (made * weights * 10**rank).sum().backward()
        return given.grad.tolist()

    with pytest.raises(UsageError, match=r"'max' has no gradient.*detach"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 2)
    return {
        "mean": gradient(hvd.allreduce, 2),
        "sum": gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), 2),
        "rows": gradient(hvd.allgather, rank + 1, 2),
        "numbers": gradient(hvd.allgather),
        "of rank 1": gradient(lambda x: hvd.broadcast(x, 1), 2),
        "has none": hvd.allreduce_async(torch.ones(2, requires_grad=True)).requires_grad,
        "whole": hvd.allreduce(torch.tensor([-3, 2, 4]) * rank).tolist(),
    }


def test_collectives_have_the_gradients_of_horovod():
    """They were constants, which trained something else; the mean of whole numbers was an error."""
    same = {"mean": [5.5, 11.0], "sum": [33.0, 66.0], "has none": False, "whole": [-1, 1, 2]}
    first, second = run_ranks(_gradients, 2)
    assert first == same | {"rows": [[11.0, 22.0]], "numbers": 11.0, "of rank 1": [0.0, 0.0]}
    rows = [[33.0, 44.0], [55.0, 66.0]]
    assert second == same | {"rows": rows, "numbers": 22.0, "of rank 1": [11.0, 22.0]}


def _beside_smp():
    horovod.provide()
    import horovod.torch as hvd

    smp.init({"partitions": 2, "microbatches": 2, "horovod": True})
    model = smp.DistributedModel(_model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @smp.step
    def step(batch):
        loss = model(batch).square().mean()
        model.backward(loss)
        return loss

    for number in range(3):
        optimizer.zero_grad()
        step(_batch(hvd.rank(), number))
        optimizer.step()
    state = model.state_dict()
    ranks = hvd.rank(), hvd.size(), smp.dp_rank()
    smp.shutdown()
    return ranks, list(state.values())


def test_beside_smp_the_ranks_are_the_replicas():
    expected = _plain()
    for number, (ranks, parameters) in enumerate(run_ranks(_beside_smp, 4)):
        assert ranks == (number // 2, 2, number // 2)
        for mine, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(horovod, "_path", lambda: tmp_path / "shardwright-horovod.pth")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(horovod._NAMES)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_the_names_come_in_when_somebody_asks_for_them(folder):
    assert horovod.is_ours() is None
    assert "was written" in horovod.install()
    assert (folder / "shardwright-horovod.pth").read_text() == f"{horovod._NAMES}\n"
    assert "was removed" in horovod.uninstall()
    assert "nothing to do" in horovod.uninstall()
    horovod.provide()
    assert horovod.is_ours() is True


@pytest.mark.parametrize(
    ("asks", "remedy"),
    [
        ("import horovod.torch as hvd; hvd.Adasum", r"horovod.torch.Adasum is not here.*hvd.Average"),
        ("import horovod.torch as hvd; hvd.elastic", r"--max-restarts"),
        ("import horovod.torch.elastic", r"--max-restarts"),
        ("import horovod; horovod.run(print, np=2)", r"horovod.run is not here.*shardwright run -n 2"),
        ("from horovod import run", r"shardwright run -n 2"),
        ("from horovod.runner import run", r"shardwright run -n 2"),
        ("import horovod.torch as hvd; hvd.mpi_built_since", r"compat/README.md lists its names"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_do(folder, asks, remedy):
    """Each was a bare AttributeError, ImportError or ModuleNotFoundError."""
    horovod.provide()
    with pytest.raises(UsageError, match=remedy):
        exec(asks, {})
