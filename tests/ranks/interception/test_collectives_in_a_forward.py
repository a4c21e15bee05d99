"""Collectives of `torch.distributed` that a model or a loss calls: over the ranks that hold the same unit.

The judge is a loop as under DistributedDataParallel: one rank for each replica, the same microbatches.
"""

import subprocess
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

WIDTH, SAMPLES, MICROBATCHES = 8, 8, 2


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Centred(nn.Module):
    """Keeps a running mean over all replicas, as the centre of DINO and codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            mean = y.mean(0)
            if num_ranks() > 1:
                dist.all_reduce(mean)
            if self.training:
                self.centre.mul_(0.9).add_(mean / num_ranks(), alpha=0.1)
        return y - self.centre


class Contrasts(nn.Module):
    """Gathers what the others have, with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        everyone = torch.cat(with_gradients.all_gather(y))
        return y + (y @ everyone.T).softmax(-1) @ everyone


class EveryKind(nn.Module):
    """Sums up what all collectives give."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @torch.no_grad()
    def collected(self, own: Tensor) -> Tensor:
        num, rank = dist.get_world_size(), dist.get_rank()
        several = [own * (1 + other) for other in range(num)]
        found: list[Tensor] = []

        def new() -> Tensor:
            found.append(torch.zeros_like(own))
            return found[-1]

        dist.all_gather([new() for _ in range(num)], own)
        dist.all_to_all([new() for _ in range(num)], several)
        dist.gather(own, [new() for _ in range(num)] if rank == 0 else None, dst=0)
        dist.scatter(new(), several if rank == 0 else None, src=0)
        dist.reduce_scatter(new(), several)
        dist.reduce_scatter_tensor(new(), torch.cat(several))
        dist.broadcast(new().copy_(own), src=0)
        dist.all_reduce(new().copy_(own), op=dist.ReduceOp.MAX, async_op=True).wait()
        for call in (dist.all_gather_into_tensor, dist.all_to_all_single):
            whole = own.new_zeros(num * WIDTH)
            call(whole, own if call is dist.all_gather_into_tensor else torch.cat(several))
            found += whole.chunk(num)
        dist.reduce(reduced := own.clone(), dst=0)
        dist.barrier()
        return sum(found) + (reduced if rank == 0 else 0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.collected(x.detach().mean(0))


class Net(nn.Module):
    """Calls some inside of units and some between them, of what units give and of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Centred(), Contrasts(), EveryKind())
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        count = (x > 0).sum().double().reshape(1)
        dist.all_reduce(count)  # as the number of boxes in DETR
        y = self.first(x)
        mean = with_gradients.all_reduce(y.mean(0)) / num_ranks()
        return self.last(self.blocks(y - mean)) / (count / num_ranks()).clamp(min=1)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(SAMPLES, WIDTH, generator=generator).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plainly() -> tuple[list[float], dict[str, Tensor]]:
    """Two steps and an evaluation on one of the replicas."""
    warnings.simplefilter("ignore", FutureWarning)  # of names that scripts have, and newer versions not
    model, losses = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for part in batch(step, dist.get_rank()).chunk(MICROBATCHES):
            loss = loss_of(model, part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses += [loss_of(model, part).item() for part in batch(1, dist.get_rank()).chunk(MICROBATCHES)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def over_stages(settings: dict[str, Any]) -> tuple[int, list[float], dict[str, Tensor]]:
    warnings.simplefilter("ignore", FutureWarning)  # of names that scripts have, and newer versions not
    with tempfile.TemporaryDirectory() as run_dir:
        sw.init({"microbatches": MICROBATCHES, "profile": "estimated", "run_dir": run_dir, **settings})
        model = sw.DistributedModel(made())
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        losses = []
        for step in range(2):
            optimizer.zero_grad()
            losses += [float(loss) for loss in train(model, batch(step, sw.dp_rank())).outputs]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses += [float(v) for v in sw.step(loss_of)(model, batch(1, sw.dp_rank())).outputs]
        assert dist.get_world_size() == sw.size()  # it is that of all ranks again
        found = sw.dp_rank(), losses, model.state_dict()
        sw.shutdown()
    return found


def test_collectives_are_those_of_the_replicas():
    """They waited for ranks that hold other units, until the timeout, and the message named no call."""
    expected = run_ranks(plainly, 2)
    for replica, losses, state in run_ranks(
        over_stages, 4, {"pipeline_parallel_degree": 2, "pipeline": "zb_v"}
    ):
        torch.testing.assert_close(losses, expected[replica][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, expected[replica][1], rtol=1e-12, atol=1e-12)


def synchronised_losses() -> tuple[list[float], list[float]]:
    """What a step function has read of its loss, averaged over replicas, and the plain values."""
    with tempfile.TemporaryDirectory() as run_dir:
        sw.init(
            {"pipeline_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "run_dir": run_dir}
        )
        plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        torch.manual_seed(0)
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
        seen: list[float] = []

        def train(model: Any, x: Tensor) -> None:
            loss = loss_of(model, x)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            seen.append((mean / dist.get_world_size()).item())
            model.backward(loss)

        expected = [
            sum(loss_of(plain, batch(0, replica).chunk(2)[part]).item() for replica in range(2)) / 2
            for part in range(2)
        ]
        model = sw.DistributedModel(plain)
        sw.step(train)(model, batch(0, sw.dp_rank()))
        sw.shutdown()
    return seen[-2:], expected


def test_a_step_function_may_read_what_it_has_reduced():
    for seen, expected in run_ranks(synchronised_losses, 4):
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


class Calls(nn.Module):
    """Calls something that is refused in a step."""

    def __init__(self, what: str, group: Any) -> None:
        super().__init__()
        self.linear, self.what, self.group = nn.Linear(WIDTH, WIDTH), what, group

    def __deepcopy__(self, memo: Any) -> "Calls":
        return Calls(self.what, self.group)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.what == "objects":
            dist.all_gather_object([None] * num_ranks(), len(x))
        elif self.what == "group":
            dist.all_reduce(y.detach(), group=self.group)
        elif self.what == "group with gradients":
            y = with_gradients.all_reduce(y, group=self.group)
        elif self.what == "functional":
            functional.all_reduce(y.detach(), "sum", dist.group.WORLD)
        elif self.what == "functional by name":
            functional.all_gather_tensor(y.detach(), 0, dist.group.WORLD.group_name)
        elif self.what == "functional by ranks":
            functional.reduce_scatter_tensor(y.detach(), "sum", 0, list(range(2)))
        return y


REFUSED = {
    "objects": "calls a collective of objects in a step",
    "group": "calls torch.distributed.all_reduce of a process group of its own",
    "group with gradients": "calls torch.distributed.all_reduce of a process group of its own",
    "functional": "a functional collective",
    "functional by name": "a functional collective",
    "functional by ranks": "a functional collective",
}


def refusals() -> dict[str, str]:
    """What errors say, of a collective in a unit and of one between units."""
    warnings.simplefilter("ignore", FutureWarning)  # of ranks in the place of a group
    group, said = dist.new_group([0, 1]), {}
    for what in REFUSED:
        with tempfile.TemporaryDirectory() as run_dir:
            sw.init(
                {"pipeline_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "run_dir": run_dir}
            )
            layers = [nn.Linear(WIDTH, WIDTH), Calls(what, group), nn.Linear(WIDTH, WIDTH)]
            model = sw.DistributedModel(nn.Sequential(*layers))
            try:
                sw.step(loss_of)(model, torch.ones(4, WIDTH))
            except UsageError as error:
                said[what] = str(error)
            sw.shutdown()
    return said


def test_what_cannot_go_over_replicas_is_refused_with_the_line():
    for said in run_ranks(refusals, 2):
        assert said.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in said[what]
            assert "test_collectives_in_a_forward.py:" in said[what]


@pytest.mark.thorough
def test_collectives_with_gradients_have_no_default_group():
    """Imported behind the start of a run, they went over all ranks also in a step, and waited there."""
    script = (
        "import shardwright.torch as sw, torch.distributed as dist\n"
        "sw.init({'run_dir': 'off'})\n"
        "import torch.distributed.nn.functional as with_gradients\n"
        "assert with_gradients.all_reduce.__defaults__[-1] is None, with_gradients.all_reduce.__defaults__\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
