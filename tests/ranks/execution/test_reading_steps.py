"""Step functions that read values of tensors, wherever these are, and go on by what they have read."""

import operator
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET, VOCABULARY, Net, batches, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw
from shardwright.errors import PlanError, TraceMismatchError, UsageError
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes
from shardwright.torch.execution import program_maker

MICROBATCHES = 4


class TwoHeads(nn.Module):
    """Has an output of an early stage, which nothing but the step function uses, and one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.early = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.early(self.net.embedding(x))
        return {"early": early, "logits": self.net(x)}


def count_call() -> int:
    """Counts the calls of a step function for microbatches; gives the number of this one."""
    if not sw.is_tracing():
        calls[0] += 1
    return calls[0]


def outcome(
    function: Callable[..., Any],
    *,
    model: Callable[[], nn.Module] = Net,
    steps: int = 2,
    trains: bool = True,
    batches_of: int = 1,
    **settings: Any,
) -> Any:
    """What each step returns, gradients of the last, and weights behind it."""
    calls[0] = 0
    sw.init({**QUIET, "microbatches": MICROBATCHES, **settings})
    torch.manual_seed(0)
    wrapped = sw.DistributedModel(model().double()).train(trains)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01))
    step = sw.step(function)
    results = []
    for x, y in batches(steps):
        x, y = (part.repeat(batches_of, 1).chunk(sw.dp_size())[sw.dp_rank()] for part in (x, y))
        optimizer.zero_grad()
        results.append(plain(step(wrapped, x, y)))
        optimizer.step()
    gradients = {n: p.grad for n, p in wrapped.local_named_parameters() if p.grad is not None}
    return results, gradients, wrapped.state_dict()


def plain(tree: Any) -> Any:
    """Results without `StepOutput`."""
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, tuple | list):
        return [plain(item) for item in tree]
    return [each.tolist() for each in tree.outputs] if hasattr(tree, "outputs") else tree


_OF_OUTCOME = ("model", "trains", "steps", "batches_of")


def same_as_on_one_rank(function: Callable[..., Any], *, ranks: int = 2, **settings: Any) -> None:
    """Compares results on every rank, and weights, with those of one rank."""
    how = {name: settings.pop(name) for name in _OF_OUTCOME if name in settings}
    if "microbatches" in settings:
        how["microbatches"] = settings.pop("microbatches")
    (results, gradients, weights) = run_ranks(outcome, 1, function, **how)[0]
    settings = {"pipeline_parallel_degree": ranks, **settings}
    for others in run_ranks(outcome, ranks, function, **settings, **how):
        assert_close(others[0], results)
        for name, gradient in others[1].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-14)
        for name, weight in others[2].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-14)


def assert_close(found: Any, expected: Any) -> None:
    """Compares trees of numbers and texts."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-10)
    else:
        assert found == expected


def reads_all(model: Any, x: Tensor, y: Tensor) -> Any:
    """Reads before its backward and behind it, in all ways."""
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    if torch.isnan(loss) or not torch.isfinite(loss).all():
        raise RuntimeError("the loss is not finite")
    before = loss.item()
    model.backward(loss)
    correct = logits.argmax(-1).eq(y).sum().item()
    ten = loss.detach() * 10
    shown = f"{ten:.3f}"
    ten.zero_()
    return {
        "loss": loss,
        "numbers": [
            before,
            2 * loss.item() / 3,
            round(loss.item(), 2),
            correct,
            int(loss.item()),
            float(ten),
        ],
        "texts": [
            f"{loss.item():.3f}",
            "%.3f" % loss.item(),  # noqa: UP031
            str(correct),
            shown,
            f"{loss.detach():.6f}",
            repr(ten),
        ],
        "lists": logits.argmax(-1).tolist(),
        "array": float(loss.detach().cpu().numpy()) + float(loss.detach()),
        "of": {f"at most {max(correct, 0) * 0}": loss.item() > 3},
        "rows": [logits[y == y.max()].shape[-1], len(logits), x.sum().item()],
    }


def test_values_are_those_of_a_plain_loop_on_every_rank() -> None:
    same_as_on_one_rank(reads_all, ranks=3)


def skips(model: Any, x: Tensor, y: Tensor) -> Any:
    """Trains with some microbatches alone."""
    loss = loss_of(model, x, y)
    if loss.item() < 15:
        model.backward(loss)
    return loss.detach()


def changes_under_two_names(model: Any, x: Tensor, y: Tensor) -> Any:
    """A view, made before its base is changed."""
    logits = model(x).clone()
    shift = logits[:, :-1]
    logits.div_(2.0)
    loss = F.cross_entropy(shift.flatten(0, 1), y[:, 1:].flatten())
    first = loss.item()
    model.backward(loss)
    return loss, first


def calls_a_part_of_the_model(model: Any, x: Tensor, y: Tensor) -> Any:
    """Modules inside the model, from the step function."""
    net = model.module
    hidden = net.blocks[0](net.embedding(x))
    for block in net.blocks[1:]:
        hidden = block(hidden)
    loss = net.mix(hidden).square().mean()
    size = hidden.detach().abs().max().item()
    if size > 0:
        loss = loss / size
    model.backward(loss)
    return loss, size


@pytest.mark.parametrize(
    "function",
    [
        *(skips, calls_a_part_of_the_model, changes_under_two_names),
    ],
)
def test_what_is_decided_is_decided_on_all_ranks(function: Any) -> None:
    same_as_on_one_rank(function, ranks=2)


@pytest.mark.thorough
def test_replicas_decide_for_themselves() -> None:
    """Some microbatches of each are left out; weights are as with one replica of all."""
    (results, _, weights) = run_ranks(outcome, 1, skips)[0]
    layout = {"pipeline_parallel_degree": 2, "data_parallel_degree": 2, "microbatches": MICROBATCHES // 2}
    found = run_ranks(outcome, 4, skips, **layout)
    of_replicas = [found[0][0], found[-1][0]]
    joined = [first + second for first, second in zip(*of_replicas, strict=True)]
    assert_close(joined, results)
    for _, _, others in found:
        for name, weight in others.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-14)


calls = [0]


def some_rank_reads(rank: int, every: int) -> Callable[..., Any]:
    """A step function, of which one rank reads, in some calls."""

    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        count_call()
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if sw.rank() in (rank, -rank) and calls[0] % every == every - 1:
            print(f"alone: {loss.item():.6f} {logits.argmax(-1).float().mean().item():.6f}")
        model.backward(loss)
        if sw.rank() == rank:
            print(f"behind: {loss.item():.6f}")
            print("tensor:", loss.detach())
        return loss

    return step


class Kept:
    """A terminal that keeps what is printed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.thorough
def test_one_rank_may_read_alone() -> None:
    def run() -> tuple[Any, str]:
        before, kept = sys.stdout, Kept()
        sys.stdout = kept  # type: ignore[assignment]
        try:
            step = some_rank_reads(1, 1)
            return outcome(step, steps=3, pipeline_parallel_degree=2), kept.text
        finally:
            sys.stdout = before

    found = run_ranks(run, 2)
    (results, _, _), text = found[1]
    losses = [f"{each:.6f}" for step in results for each in step]
    lines = text.splitlines()
    behind = [line.split()[1] for line in lines if line.startswith("behind")]
    assert behind == losses
    # Not one more for the trace, which ends between its words.
    assert len([line for line in lines if line.startswith("tensor: tensor(")]) == text.count("tensor:")
    assert text.count("tensor:") == len(losses)
    alone = [line.split()[1] for line in lines if line.startswith("alone")]
    assert len(alone) >= len(losses) - 1
    assert set(alone) <= set(losses)
    assert not [line for line in found[0][1].splitlines() if "alone" in line]


def one_reads_later(model: Any, x: Tensor, y: Tensor) -> Any:
    """One rank alone, by a function that does not look like it, in later calls."""
    number = count_call()
    loss = loss_of(model, x, y)
    if number > MICROBATCHES + 2 and sw.rank() == 0:
        value_of(loss)
    model.backward(loss)
    return loss


def test_a_read_that_nobody_could_foresee_is_refused_and_not_waited_for() -> None:
    def run() -> None:
        outcome(one_reads_later, steps=3, pipeline_parallel_degree=2, pipeline="1f1b")

    with pytest.raises(RanksFailedError, match=r"TraceMismatchError: (?s:.*)passed its backward, or ended"):
        run_ranks(run, 2, timeout_s=30)


value_of = operator.methodcaller("item")  # a name that tells nothing


def reads_later(model: Any, x: Tensor, y: Tensor) -> Any:
    """Reads in later calls, by a function that does not look like it, and decides."""
    number = count_call()
    loss = loss_of(model, x, y)
    twice = loss * 2
    if number > MICROBATCHES + 2 and value_of(twice) > 25:
        twice = twice.log()
    model.backward(twice)
    return twice


def test_values_may_be_read_in_later_calls_alone() -> None:
    from shardwright.torch.interception.step_code import ReadingStep

    assert not ReadingStep(reads_later).may_read
    assert ReadingStep(reads_all).may_read

    def run() -> Any:
        return outcome(reads_later, steps=3, pipeline_parallel_degree=2)[0]

    one, other = run_ranks(run, 2)
    assert one == other
    # The trace was one call.
    assert all(each > 20 for each in one[0])
    assert any(each < 4 for each in one[2])


class Parts(nn.Module):
    """Modules that a step function may call one by one; some of them, and the glue, change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.body = nn.ModuleList(Residual() for _ in range(6))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for part in self.body:
            hidden = F.relu_(part(hidden) + 0.1)
        logits: Tensor = self.head(hidden)
        return logits


class Residual(nn.Module):
    """Has units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.linear(x))


def reads_between_parts_later(model: Any, x: Tensor, y: Tensor) -> Any:
    """What no trace could foresee, in the middle of the model."""
    number = count_call()
    reads, total = number > MICROBATCHES + 2, 0.0
    hidden = model.module.embedding(x)
    for part in model.module.body:
        hidden = part(hidden)
        size = hidden.sum()
        if reads:
            total += value_of(size)
    loss = F.cross_entropy(model.module.head(hidden).flatten(0, 1), y.flatten())
    model.backward(loss)
    return loss, total


def test_values_may_be_read_between_parts_of_the_model() -> None:
    """A rank in the middle sent what it had not computed, because it waited for a value of an earlier one."""
    same_as_on_one_rank(
        reads_between_parts_later, model=Parts, ranks=3, pipeline="interleaved_1f1b", virtual_stages=2
    )


class ScaledReLU(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() * self.scale


class Changing(Parts):
    """Has such a module in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = ScaledReLU()


def total(tensor: Tensor) -> float:
    """Sum, without an operation that the trace does not have."""
    return float(sum(sum(row) for sample in tensor.tolist() for row in sample))


def one_reads_before_a_change(model: Any, x: Tensor, y: Tensor) -> Any:
    """The rank that has it does not come by."""
    number = count_call()
    parts = model.module
    hidden = parts.body[0](parts.embedding(x)) * 1.0
    alone = 0.0
    if number > MICROBATCHES + 2 and sw.pp_rank() == sw.pp_size() - 1:
        alone = total(hidden)
    logits = parts.head(parts.body[1](parts.relu(hidden)))
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    model.backward(loss)
    return loss, alone


def test_one_rank_reads_what_a_module_changes_later() -> None:
    def run(ranks: int) -> Any:
        how = {"pipeline_parallel_degree": 2, "pipeline": "1f1b"} if ranks == 2 else {}
        return outcome(one_reads_before_a_change, model=Changing, steps=3, **how)[0]

    expected = run_ranks(run, 1, 1)[0]
    first, last = run_ranks(run, 2, 2)
    assert_close(last, expected)
    assert first[2][1] == [0.0] * MICROBATCHES


def one_reads_between_calls_of_the_model(model: Any, x: Tensor, y: Tensor) -> Any:
    """In some calls, the first loss."""
    number = count_call()
    first = loss_of(model, x, y)
    if number > MICROBATCHES + 2 and sw.rank() == 0:
        print(first.item())
    second = loss_of(model, y, x)
    model.backward(first + second)
    return first, second


def test_one_rank_reads_between_calls_of_the_model() -> None:
    """The rank that had it was on its way to its next stage, and has put it up before."""
    same_as_on_one_rank(
        one_reads_between_calls_of_the_model, steps=3, pipeline="interleaved_1f1b", virtual_stages=2
    )


def recomputes_behind_a_read(model: Any, x: Tensor, y: Tensor) -> Any:
    """What an early stage has made."""
    out = model(x)
    factor = out["logits"].sum().item()
    early = checkpoint(lambda tensor: tensor.sin() * factor, out["early"], use_reentrant=False)
    loss = F.cross_entropy(out["logits"].flatten(0, 1), y.flatten()) + early.mean()
    model.backward(loss)
    return loss


def test_what_is_recomputed_behind_a_read() -> None:
    """The backward got stand-ins for tensors of other ranks."""
    same_as_on_one_rank(
        recomputes_behind_a_read, model=TwoHeads, pipeline="interleaved_1f1b", virtual_stages=2
    )


class Tagged(Net):
    """Has an attribute that its code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = ""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(self.tag) < 9 else x


def test_ranks_trace_together_or_not_at_all() -> None:
    """One whose model had got another attribute traced alone, and waited for the others."""

    def run() -> tuple[int, list[float]]:
        sw.init({**QUIET, "pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
        torch.manual_seed(0)
        model = sw.DistributedModel(Tagged().double())
        step = sw.step(reads_values_behind_backward)
        plain_trace, traced = program_maker.trace_step, []

        def trace_step(*args: Any, **kwargs: Any) -> Any:
            traced.append(number)
            return plain_trace(*args, **kwargs)

        program_maker.trace_step = trace_step
        losses = []
        x, y = batches(1)[0]
        for number in range(4):
            if number == 2 and sw.rank() == 1:
                model.get_module().tag = "other"
            losses.append(step(model, x, y)[0])
        return traced.count(2), losses

    (times, losses), (others_times, others_losses) = run_ranks(run, 2, timeout_s=60)
    assert times == others_times == 1
    assert losses == others_losses
    assert losses[0] == losses[-1]


def reads_values_behind_backward(model: Any, x: Tensor, y: Tensor) -> float:
    """One number."""
    loss = loss_of(model, x, y)
    model.backward(loss)
    return float(loss.item())


def alone_with_much(model: Any, x: Tensor, y: Tensor) -> Any:
    """One rank reads a large tensor."""
    logits = model(x.repeat(1, 100))
    mean = logits.mean()
    if sw.rank() == 0:
        print(logits.tolist()[0])
    return mean


def draws_behind_a_read(model: Any, x: Tensor, y: Tensor) -> Any:
    """Ranks would not draw the same."""
    loss = loss_of(model, x, y)
    if loss.item() > 0:
        loss = loss * torch.rand(())
    model.backward(loss)
    return loss


def uses_a_parameter(model: Any, x: Tensor, y: Tensor) -> Any:
    """Behind a read, one that another rank has."""
    loss = loss_of(model, x, y)
    if loss.item() > 0:
        loss = loss + model.module.mix.weight.sum() + model.module.embedding.weight.sum()
    model.backward(loss)
    return loss


def trains_twice(model: Any, x: Tensor, y: Tensor) -> Any:
    """Two backwards."""
    loss = loss_of(model, x, y)
    if loss.item() > 0:
        model.backward(loss)
    model.backward(loss)


class Deep(TwoHeads):
    """Gives away what goes on to later stages."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.net.embedding(x)
        late = early
        for block in self.net.blocks:
            late = block(late)
        return {"early": early, "late": late}


def calls_a_part_behind_a_read(model: Any, x: Tensor, y: Tensor) -> Any:
    """No trace has come by there, so that it is not even a unit."""
    hidden = model.module.body[0](model.module.embedding(x))
    if hidden.sum().item() < 1e9:
        hidden = model.module.body[1](hidden)
    return hidden


def reads_too_early(model: Any, x: Tensor, y: Tensor) -> Any:
    """There is nothing for a second stage."""
    hidden = model.module.embedding(x)
    return model.module.body[0](hidden) if hidden.sum().item() < 1e9 else hidden


def trains_an_early_output(model: Any, x: Tensor, y: Tensor) -> Any:
    """Whose gradient would have to go to its stage by a way that is not there."""
    out = model(x)
    scale = out["late"].sum().item()
    loss = out["late"].square().mean() + out["early"].square().mean() * (scale != 1)
    model.backward(loss)
    return loss


REFUSED = {
    alone_with_much: (TraceMismatchError, "Use large tensors on all ranks, or on none"),
    calls_a_part_behind_a_read: (UsageError, "the model is called again behind a value"),
    draws_behind_a_read: (TraceMismatchError, "draws random numbers behind"),
    uses_a_parameter: (TraceMismatchError, "a parameter is used by the step function, behind a value"),
    trains_twice: (UsageError, "backward is called a second time"),
    reads_too_early: (PlanError, "has 1 units to place.*The step function reads a value at .*test_reading"),
    trains_an_early_output: (TraceMismatchError, "its gradient cannot go back there"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_known_is_refused(function: Any) -> None:
    error, message = REFUSED[function]
    trains = function not in (alone_with_much, calls_a_part_behind_a_read, reads_too_early)
    models = {
        trains_an_early_output: Deep,
        calls_a_part_behind_a_read: Parts,
        reads_too_early: Parts,
    }
    model = models.get(function, Net)
    with pytest.raises(RanksFailedError, match=rf"{error.__name__}: (?s:.*){message}"):
        run_ranks(
            *(outcome, 2, function),
            model=model,
            trains=trains,
            pipeline_parallel_degree=2,
            pipeline="1f1b",
        )


def raises(model: Any, x: Tensor, y: Tensor) -> Any:
    """An error by a value that one rank has."""
    loss = loss_of(model, x, y)
    if loss > 0:
        raise ValueError(f"a loss of {loss.item():.3f}")
    model.backward(loss)


def test_an_error_by_a_value_is_raised_on_every_rank() -> None:
    def run() -> str:
        with pytest.raises(ValueError, match="a loss of 1") as caught:
            outcome(raises, pipeline_parallel_degree=2, pipeline="1f1b")
        return str(caught.value)

    one, other = run_ranks(run, 2)
    assert one == other


def ends(model: Any, x: Tensor, y: Tensor) -> Any:
    """The rank that has the loss ends before others know it."""
    loss = loss_of(model, x, y)
    if sw.rank() == 1 and model.partitioned:
        os.kill(os.getpid(), signal.SIGKILL)
    model.backward(loss * (1 + loss.item()))


def test_a_rank_that_waits_for_one_that_has_ended_says_so() -> None:
    settings = {"pipeline_parallel_degree": 2, "pipeline": "1f1b"}
    waits, killed = run_ranks_outcomes(outcome, 2, ends, steps=1, timeout_s=30, **settings)
    assert killed.exit_code == -signal.SIGKILL
    assert "PeerLostError" in waits.error
    assert "rank 1 failed first (it left without a word" in waits.error


class Meter:
    """Adds up, as meters of scripts do."""

    total = 0.0
    values: tuple[float, ...] = ()


def test_sums_and_counts_are_those_of_a_plain_loop() -> None:
    """A microbatch was left at its first read, so that others added to the same total meanwhile."""

    def run() -> None:
        meter, seen, count = Meter(), [], [0]

        def step(model: Any, x: Tensor, y: Tensor) -> Any:
            loss = loss_of(model, x, y)
            number = count[0]
            meter.total += loss.item()
            meter.values = (*meter.values, float(loss.detach()))
            seen.append(number)
            count[0] = number + 1
            model.backward(loss)
            return loss

        results = outcome(step, pipeline_parallel_degree=2, pipeline="interleaved_1f1b", virtual_stages=2)[0]
        losses = [each for step in results for each in step]
        assert list(meter.values) == losses
        assert meter.total == pytest.approx(sum(losses))
        assert seen == list(range(2 * MICROBATCHES))

    run_ranks(run, 2)


kept_total: Any = 0.0


def test_tensors_may_be_kept_outside_of_the_step() -> None:
    """They were stand-ins, also on the rank that had them, and failed when they were used at the end."""

    def run() -> None:
        meter, losses, last, by_name, before = Meter(), [], None, {}, []

        def step(model: Any, x: Tensor, y: Tensor) -> Any:
            global kept_total
            nonlocal last
            loss = loss_of(model, x, y)
            before.append(loss.detach())
            model.backward(loss)
            losses.append(loss.detach())
            meter.total = meter.total + loss.detach()
            kept_total = kept_total + loss.detach()
            last = loss.detach()
            by_name["last"] = (loss.detach(), x.sum())
            return loss

        results = outcome(step, pipeline_parallel_degree=2, pipeline="interleaved_1f1b", virtual_stages=2)[0]
        expected = [each for step in results for each in step]
        assert torch.stack(losses).tolist() == torch.stack(before).tolist() == expected
        assert float(meter.total) == float(kept_total) == pytest.approx(sum(expected))
        assert float(last) == float(by_name["last"][0]) == expected[-1]

    run_ranks(run, 2)
