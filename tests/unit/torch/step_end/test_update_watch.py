"""A loop that lacks ``optimizer.step()`` or ``zero_grad()`` is told so, once."""

import pytest
import torch
from torch import nn

from shardwright.torch.step_end.update_watch import UpdateWatch


@pytest.fixture
def told(caplog):
    """What is said in a loop of 12 batches; `loop` gets the model, the optimizer, and a training step."""

    def run(loop, *, warns: bool = True, make=torch.optim.SGD, lr: float = 0.1) -> list[str]:
        caplog.clear()
        torch.manual_seed(0)
        model, watch = nn.Linear(3, 2), UpdateWatch(warns=warns)
        optimizer = make(model.parameters(), lr=lr)

        def note(optimizer, *_):
            own = {id(p) for p in model.parameters()}
            mine = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            (watch.note if mine else watch.note_other)(optimizer)

        def train(scaled=False):
            watch.begin()
            model(torch.ones(4, 3)).square().mean().backward()
            watch.end(model.parameters(), scaled=scaled)

        optimizer.register_step_pre_hook(note)
        for number in range(12):
            loop(number, model, optimizer, train, note)
        return [record.getMessage() for record in caplog.records]

    return run


def as_usual(number, model, optimizer, train, note):
    optimizer.zero_grad()
    train()
    optimizer.step()


def zeroes_in_place_at_the_end(number, model, optimizer, train, note):
    train()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def sums_over_four_batches(number, model, optimizer, train, note):
    train()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def updates_by_hand(number, model, optimizer, train, note):
    train()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def another_step_comes_between(number, model, optimizer, train, note):
    """As in a GAN: the generator's step begins with the discriminator's gradients still there."""
    optimizer.zero_grad()
    train()
    optimizer.step()
    train()
    note(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def scales_too_much(number, model, optimizer, train, note):
    optimizer.zero_grad()
    train(scaled=number < 8)
    if number >= 8:
        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        as_usual,
        zeroes_in_place_at_the_end,
        sums_over_four_batches,
        updates_by_hand,
        another_step_comes_between,
        scales_too_much,
    ],
    ids=lambda loop: loop.__name__,
)
def test_loops_with_all_they_need(told, loop):
    assert not told(loop)


def never_steps(number, model, optimizer, train, note):
    optimizer.zero_grad()
    train()


def never_zeroes(number, model, optimizer, train, note):
    train()
    optimizer.step()


def zeroes_between(number, model, optimizer, train, note):
    train()
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    optimizer.step()


def steps_another(number, model, optimizer, train, note):
    optimizer.zero_grad()
    train()
    note(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (never_steps, "4 steps have made gradients, and nothing has updated the parameters"),
        (never_zeroes, "gradients were not cleared after 3 updates"),
        (zeroes_between, "3 updates found no gradients: zero_grad() is called between"),
        (steps_another, "SGD.step() is called, but that optimizer has no parameter of the wrapped model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_missing_is_told_once_on_one_rank(told, loop, words):
    (text,) = told(loop)
    assert words in text
    assert not told(loop, warns=False)
