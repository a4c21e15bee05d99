"""What a script does with parameters and buffers that its rank has given up."""

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stacks import Stack, batches, start
from stacks import train as squares
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks


class Normed(Stack):
    """Has buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return self.head(x)


def train_both(
    optimizers: Sequence[torch.optim.Optimizer], train: Callable[[Tensor], Any], plain: nn.Module, x: Tensor
) -> None:
    """One step of the wrapped model and one of the plain one."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    train(x)
    sum(plain(part).square().mean() / 4 for part in x.tensor_split(4)).backward()
    for optimizer in optimizers:
        optimizer.step()


def trained(prepare: Callable[[nn.Module], Any], num_steps: int = 1) -> tuple[Any, Any, Any]:
    """The library, a model that is spread over stages, and what `prepare` made of it before it was."""
    sw, _, model = start(Normed, {})
    prepared = prepare(model.module)
    train = sw.step(squares)
    for number in range(num_steps):
        train(model, batches(number, 1)[0])
    return sw, model, prepared


def remote(model: Any) -> dict[str, nn.Parameter]:
    """Parameters that this rank has given up."""
    own = dict(model.local_named_parameters())
    return {name: p for name, p in model.module.named_parameters() if name not in own}


def update_averages(average: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.mul_(0.9).add_(theirs, alpha=0.1)


def update_averages_through_data(average: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def update_averages_together(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_mul_(list(average.parameters()), 0.9)
    torch._foreach_add_(list(average.parameters()), list(model.parameters()), alpha=0.1)


def update_averages_of_buffers(average: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
        mine.add_(theirs)


def read_numbers(average: nn.Module, model: nn.Module) -> None:
    assert [p.norm().item() for p in model.parameters()]


def save_parameters(average: nn.Module, model: nn.Module) -> None:
    torch.save(dict(model.named_parameters()), io.BytesIO())


def average_of_torch(average: nn.Module, model: nn.Module) -> None:
    torch.optim.swa_utils.AveragedModel(average).update_parameters(model)


USES = [
    update_averages,
    update_averages_through_data,
    update_averages_together,
    update_averages_of_buffers,
    read_numbers,
    save_parameters,
    average_of_torch,
]


def refusals(uses: Sequence[Callable[[nn.Module, nn.Module], None]]) -> dict[str, str]:
    """What is said to each use, on this rank."""
    _, model, average = trained(copy.deepcopy)
    said = {}
    for use in uses:
        try:
            with torch.no_grad():
                use(average, model.module)
        except UsageError as error:
            said[use.__name__] = str(error)
    return said


def test_values_of_other_ranks_are_not_computed_with():
    """PyTorch takes `average.add_(parameter)` for done where the parameter has no values."""
    for rank, said in enumerate(run_ranks(refusals, 2, USES)):
        assert list(said) == [use.__name__ for use in USES]
        for text in said.values():
            assert f"which are on rank {1 - rank} and not here" in text
            assert "model.local_named_parameters()" in text
            assert "model.state_dict()" in text
            assert "test_parameters_of_other_ranks.py:" in text or "swa_utils" in text
    assert "of blocks.0.up.weight," in said["update_averages"]
    assert "of norms.0.running_mean," in said["update_averages_of_buffers"]


def old_lists() -> dict[str, bool]:
    """Whether what was made before the first step can be used after it."""
    found = {}
    sw, plain, model = start(Stack, {})
    parameters = list(model.parameters())
    for p in parameters:
        p.decays = p.dim() > 1  # type: ignore[attr-defined]
    graph = sum(p.square().sum() for p in parameters)
    makes = (lambda p: p.data, lambda p: p.detach()[:1], lambda p: p.view(-1))
    views = [[make(p) for p in parameters] for make in makes]
    memory = [weakref.ref(p.untyped_storage()) for p in parameters]
    backbone = list(model.module.blocks.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.1) for m in (plain, model)]
    train = sw.step(squares)

    def both(number: int) -> None:
        train_both(optimizers, lambda x: train(model, x), plain, batches(number, 1)[0])

    for number in range(4):
        for p in (*plain.blocks.parameters(), *backbone):
            p.requires_grad_(number % 2 == 1)
        both(number)
        for p in (*plain.parameters(), *parameters):
            with torch.no_grad():
                p.mul_(0.9)
    own = {id(p) for p in model.local_parameters()}
    found["one list"] = all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    found["attributes"] = all(p.decays == (p.dim() > 1) for p in parameters)  # type: ignore[attr-defined]
    del graph
    kept = [reference() is not None for reference in memory]
    found["memory"] = kept == [id(p) in own for p in parameters]
    found["training"] = all(torch.allclose(v, plain.state_dict()[n]) for n, v in model.state_dict().items())
    for kind, old in enumerate([parameters, *views]):
        refused = 0
        for tensor in old:
            try:
                torch.zeros(1).double() + tensor.sum()
            except UsageError as error:
                refused += "not here" in str(error)
        found[f"views {kind}"] = refused == len(parameters) - len(own)
    return found


def test_what_was_made_before_the_first_step_is_what_the_model_has_after_it():
    """The memory of what other ranks keep was taken from under old lists: reading it killed the process."""
    for found in run_ranks(old_lists, 2):
        assert all(found.values()), [name for name, right in found.items() if not right]


class Byol(nn.Module):
    """A student and a teacher that follows it; each has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x.flip(0))
        return (self.predictor(self.student(x)) - target).square().mean()

    @torch.no_grad()
    def follow(self) -> None:
        for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)


@torch.no_grad()
def follows_pair_by_pair(model: Any) -> None:
    net = model.module
    for student, teacher in zip(net.student.parameters(), net.teacher.parameters(), strict=True):
        with model.gathered(student, teacher):
            teacher.lerp_(student, 0.1)


def follows_as_a_whole(model: Any) -> None:
    with model.gathered(model.module.student, model.module.teacher):
        model.module.follow()


def follows_all(model: Any) -> None:
    with model.gathered():
        assert not any(tensor.is_meta for tensor in model.module.state_dict(keep_vars=True).values())
        model.module.follow()


BY_HAND = {"pipeline": "1f1b", "auto_partition": False, "default_partition": 1}


def differences_of_a_teacher(follow: Any, settings: dict[str, Any]) -> tuple[float, str, int]:
    torch.manual_seed(0)
    plain = Byol().double()
    module = copy.deepcopy(plain)
    sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off", **settings})
    if not settings.get("auto_partition", True):
        sw.set_partition(module.teacher, 0)
        sw.set_partition(module.student, 1)
        sw.set_partition(module.predictor, 1)
    model = sw.DistributedModel(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    optimizers[0] = sw.DistributedOptimizer(optimizers[0])

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    refused = ""
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        train(model, x)
        for part in x.tensor_split(2):
            (plain(part) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        plain.follow()
        follow(model)
    state = model.state_dict()
    worst = max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())
    try:
        module.follow()
    except UsageError as error:
        refused = str(error)
    return worst, refused, len(remote(model))


@pytest.mark.thorough
def test_a_teacher_follows_wherever_its_layers_are() -> None:
    """There was no way, where a rank held the teacher's layer and another one the student's."""

    def run() -> list[Any]:
        found = []
        kinds = ("1f1b", "interleaved_1f1b", "1f1b")
        for follow, kind in zip((follows_pair_by_pair, follows_as_a_whole, follows_all), kinds, strict=True):
            for settings in ({"pipeline": kind}, BY_HAND):
                found.append((settings is BY_HAND, *differences_of_a_teacher(follow, settings)))
                sw.shutdown()
        return found

    teachers_rank, students_rank = run_ranks(run, 2)
    for _, worst, _, num_remote in (*teachers_rank, *students_rank):
        assert worst < 1e-12
        assert num_remote > 0
    # A planner may place each layer of the teacher beside its student; by hand they are apart.
    for apart, _, refused, _ in teachers_rank:
        assert not apart or "with model.gathered(student, teacher):" in refused


@torch.no_grad()
def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("update", [by_data, in_place])
def test_an_update_by_hand_leaves_others_to_their_holders(update: Any) -> None:
    """``p.data.add_(p.grad)`` of another rank's parameter was PyTorch's TypeError about None."""

    def run() -> float:
        sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 2})
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        plain = copy.deepcopy(net)
        model = sw.DistributedModel(net)
        train = sw.step(squares)
        x = torch.randn(4, 4, dtype=torch.float64)
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            train(model, x)
            plain(x).square().mean().backward()
            update(model)
            update(plain)
        with pytest.raises(UsageError, match=r"meets None in an operation\. If that is its gradient"):
            [p + p.grad for p in model.parameters()]
        return max(
            float((a - b).abs().max())
            for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
        )

    assert run_ranks(run, 2) == [pytest.approx(0.0, abs=1e-12)] * 2
