"""What a step function reads of tensors of other ranks, where it may: numbers that are known at its end."""

import copy
import dataclasses
import json
import math
import numbers
import pickle
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sharded import QUIET, Net, batches, loss_of

from shardwright.errors import DeferredReadError
from shardwright.testing import run_ranks

MICROBATCHES = 3  # of other sizes


@dataclasses.dataclass
class Metrics:
    """What scripts return as a dictionary."""

    loss: Any


def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Reads its loss and its predictions, and counts with them."""
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    model.backward(loss)
    correct = logits.argmax(-1).eq(y).sum().item()
    rows = x.sum().item()  # of the batch: known now
    changed = loss.detach() * 3
    before = changed.item()
    changed.zero_()
    print(f"loss {loss.item():.3f}")
    return {
        "loss": loss.item(),
        "scaled": 1 + 2 * loss.item() / 4 - correct,
        "share": correct / y.numel() + (rows - rows),
        "predicted": logits.argmax(-1).tolist(),
        "array": loss.detach().cpu().numpy(),
        "before": before,
        "of many": [round(loss.item(), 2), abs(-loss.item()), loss.item() ** 2, 2 ** loss.item()],
        "whole": [correct // 2, correct % 2, 7 // (correct + 1), round(loss.item()), math.floor(loss.item())],
        "of both": [correct * loss.item() * len(x), numpy.float64(2) * loss.item(), loss.item() - correct],
        "of the last": logits.argmax(-1).tolist()[-1][0],
        "texts": [f"{loss.item():.3f}", str(correct), f"{correct} of {y.numel()}, {loss.item():>9.2e}!"],
        "formatted": f"{loss.item():.2f} {correct!r}",
        "of texts": texts_of(loss.item()),
        "copied": [copy.deepcopy({"v": loss.item()})["v"], dataclasses.asdict(Metrics(loss.item()))["loss"]],
        "tensor": loss,
        "count": y.numel(),
    }


def texts_of(value: Any) -> list[str]:
    """Texts that are made of texts."""
    text = f"{value:.2f}"
    return [
        *(str(value)[:6], f"{value:.4f}"[-3:], text.replace(".", ","), str(value).rjust(30) + "|"),
        *(f"{value:.2e}".upper(), f"is {value:.3f}!".title(), f"{text:>9}", "%s of %9s" % (value, text)),  # noqa: UP031
        *(" ".join([text, text.strip("0")]), str({"a": f"b {text}", "c": text, "d": value}), f"{text!r}"),
        *(json.dumps([f"b {text}", text]), f"{copy.deepcopy(text)}{text!s}"),
    ]


def on_ranks(function: Any, steps: int = 2, **settings: Any) -> Any:
    import shardwright.torch as sw
    from shardwright.torch.step import step_function

    sw.init({**QUIET, "microbatches": MICROBATCHES, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    step = step_function(function, reads_late=True)
    return [step(model, x, y) for x, y in batches(steps)]


def expected(microbatches: int) -> list[dict[str, Any]]:
    """The same from a plain loop, before any update."""
    torch.manual_seed(0)
    model: Any = Net().double()
    model.backward = lambda loss: None
    found = []
    for x, y in batches(2):
        parts = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        results = [train(model, a, b) for a, b in parts]
        found.append({name: [result[name] for result in results] for name in results[0]})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_those_of_a_plain_loop_on_every_rank(ranks: int) -> None:
    microbatches = 2 if ranks == 1 else MICROBATCHES  # of one size where lists are lists, and put together
    settings = {"pipeline_parallel_degree": ranks, "microbatches": microbatches}
    for results in run_ranks(on_ranks, ranks, train, **settings):
        for result, plain in zip(results, expected(microbatches), strict=True):
            assert result["count"] == plain["count"]
            for name in ("loss", "scaled", "share", "array", "before", "of the last"):
                wanted = [float(each) for each in plain[name]]
                assert [float(each) for each in result[name]] == pytest.approx(wanted, rel=1e-12), name
            for name in ("of many", "whole", "of both", "copied"):
                for here, there in zip(result[name], zip(*plain[name], strict=True), strict=True):
                    assert here == pytest.approx(list(there), rel=1e-12), name
                    assert list(map(type, here)) == list(map(type, there)), name
            for name in ("texts", "of texts"):
                assert result[name] == list(map(list, zip(*plain[name], strict=True)))
            assert result["formatted"] == plain["formatted"]
            assert all(type(each) is float for each in result["loss"])
            if ranks > 1:  # on one it is a list as any other, in which each number becomes a list
                assert result["predicted"] == plain["predicted"]
            assert result["tensor"].reduce_mean().item() == pytest.approx(sum(plain["loss"]) / microbatches)


def loss_value(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The loss, as a number; nothing is trained."""
    return loss_of(model, x, y).item()


def refusals(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Asks for what is not known, and goes on."""
    loss = loss_of(model, x, y)
    value = loss.item()
    value_asked = "its value is asked for inside"
    asked: list[tuple[str, Callable[[], Any]]] = [
        (value_asked, lambda: value > 1e9),
        (value_asked, lambda: bool(copy.deepcopy(value))),
        # NumPy, and tensors, said something else of what they cannot compute with.
        (value_asked, lambda: numpy.float32(value)),
        (value_asked, lambda: torch.tensor(value)),
        (value_asked, lambda: torch.tensor([value])),
        ("mul of a tensor, and of", lambda: loss * value),
        ("mean of something that was read", lambda: loss.detach().numpy().mean()),
        # Texts said what their placeholder is.
        (value_asked, lambda: str(value) == "nan"),
        (value_asked, lambda: "nan" in f"{value}"),
        (value_asked, lambda: len(f"{value:.2f}")),
        (value_asked, lambda: f"{value:.2f}".partition(".")),
        (value_asked, lambda: str(value).split(".")),
        (value_asked, lambda: f"{value}".encode()),
        (value_asked, lambda: float(f"{value:.3f}")),
        (value_asked, lambda: pickle.dumps(value)),
    ]
    for message, ask in asked:
        with pytest.raises(DeferredReadError, match=rf"test_late_values\.py:\d+: {message}"):
            ask()
    return value


def test_nothing_is_decided_by_them() -> None:
    def run() -> Any:
        with torch.no_grad():
            return on_ranks(refusals, steps=1, pipeline_parallel_degree=2)

    one, other = run_ranks(run, 2)
    assert one == other


def returned_too_early(value: Any) -> dict[str, tuple[Any, type[Exception], str]]:
    """By name: what must not be returned, what is raised instead, and what is said."""
    return {
        "cut": (lambda: f"is {value:.4f}"[:5], DeferredReadError, r"the text 'is \(known after the step\)'"),
        "bytes": (lambda: f"is {value:.4f}".encode(), DeferredReadError, "returns bytes, made of"),
        "path": (lambda: Path(f"out-{value:.3f}"), DeferredReadError, "returns PosixPath, made of"),
        "format": (lambda: f"{value:d}", ValueError, "Unknown format code 'd'"),
        "zero": (lambda: 1 / (0 * value), ZeroDivisionError, "division by zero"),
    }


def test_what_cannot_be_known_is_not_returned() -> None:
    """What a script does wrong is said to be at its line, although it is found out behind the step."""

    def run() -> None:
        import shardwright.torch as sw
        from shardwright.torch.step import step_function

        sw.init({**QUIET, "microbatches": 1, "pipeline_parallel_degree": 2})
        model = sw.DistributedModel(Net().double())
        with torch.no_grad():
            for name in returned_too_early(1.5):

                def step(model: Any, x: torch.Tensor, y: torch.Tensor, name: str) -> Any:
                    return returned_too_early(loss_value(model, x, y))[name][0]()

                _, error, message = returned_too_early(1.5)[name]
                with pytest.raises(error, match=message) as caught:
                    step_function(step, reads_late=True)(model, *batches(1)[0], name)
                if error is not DeferredReadError:
                    assert "test_late_values.py:" in " ".join(caught.value.__notes__)

    run_ranks(run, 2)


def test_a_step_that_reads_nothing_may_return_what_an_earlier_one_read() -> None:
    def run() -> None:
        import shardwright.torch as sw
        from shardwright.torch.step import step_function

        kept = Meter()

        def keep(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            value = loss_value(model, x, y)
            kept.text, kept.total = f"loss {value:.3f}", value
            kept.values.append(Meter())  # in the trace, too
            kept.values[-1].total = value
            return value

        def give(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            model(x)
            return kept.text, kept.total

        def give_of_trace(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            model(x)
            return kept.values[0].total

        sw.init({**QUIET, "microbatches": 1, "pipeline_parallel_degree": 2})
        model, batch = sw.DistributedModel(Net().double()), batches(1)[0]
        with torch.no_grad():
            value = step_function(keep, reads_late=True)(model, *batch)[0]
            assert step_function(give, reads_late=True)(model, *batch) == ([f"loss {value:.3f}"], [value])
            with pytest.raises(DeferredReadError, match="read while the step was traced"):
                step_function(give_of_trace, reads_late=True)(model, *batch)

    run_ranks(run, 2)


def test_they_may_be_keys_of_what_is_returned() -> None:
    def keys(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        value = loss_value(model, x, y)
        return {f"{value:.3f}": {"deep": {f"a {value:.1f}": value}}, value: 1, (2, f"{value}"): [f"{value}"]}

    def run() -> Any:
        with torch.no_grad():
            found = on_ranks(keys, steps=1, microbatches=1, pipeline_parallel_degree=2)[0]
            value = next(key for key in found if isinstance(key, float))
            deep = {"deep": {f"a {value:.1f}": [value]}}
            assert found == {f"{value:.3f}": deep, value: [1], (2, f"{value}"): [[f"{value}"]]}

    run_ranks(run, 2)


def test_texts_and_sums_may_be_made_in_some_calls_and_on_some_ranks() -> None:
    """Each of them moved what ranks find in the results of each other."""

    def run() -> Any:
        calls, kept = [0], Meter()

        def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            import shardwright.torch as sw

            calls[0] += 1
            loss = loss_of(model, x, y)
            model.backward(loss)
            value, twice = loss.item(), (2 * loss).item()
            if calls[0] // 2 % 2 == 0 or sw.rank() == 1:
                kept.total = 0.9 * value
                kept.values.extend(f"loss {value:.3f}" for _ in range(calls[0]))
            return {"loss": loss, "value": value, "twice": twice}

        for found in on_ranks(step, steps=4, pipeline_parallel_degree=2):
            losses = [each.item() for each in found["loss"].outputs]
            assert found["value"] == losses
            assert found["twice"] == [2 * each for each in losses]
        return float(kept.total)

    run_ranks(run, 2)


class Stream:
    """A terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_what_is_printed_can_be_read() -> None:
    def run() -> None:
        stream, kept, before = Stream(), Meter(), sys.stdout
        sys.stdout = stream  # type: ignore[assignment]

        def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            value = loss_value(model, x, y)
            print("loss", value, f"is {value:.3f}", [f"or {value}"], {"v": value})
            kept.text = f"it was {value:.3f}"
            return value

        with torch.no_grad():
            values = on_ranks(step, steps=1, pipeline_parallel_degree=2)[0]
        later = "(known after the step)"
        assert f"loss {later} is {later} ['or {later}'] {{'v': {later}}}\n" in stream.text
        stream.text = ""
        print(kept.text)
        assert stream.text == f"it was {values[-1]:.3f}\n"
        sys.stdout = before

    run_ranks(run, 2)


class Five:
    """A value that is not known at first."""

    def __init__(self) -> None:
        self.is_known = False

    @property
    def known(self) -> int:
        assert self.is_known
        return 5


def test_each_piece_of_a_placeholder_shows_itself() -> None:
    from shardwright.torch.late_texts import LateText, filled_in, is_marked

    value = Five()
    text = "ab" + LateText(value, str) + "c"
    for form in (str.upper, str.casefold, str.title, lambda text: unicodedata.normalize("NFKC", text)):
        assert form(text).lower() == text
    pieces = {text[begin:end] for begin in range(len(text)) for end in range(begin + 1, len(text) + 1)}
    value.is_known = True
    assert filled_in(text) == "ab5c"
    for piece in pieces - {"a", "ab", "b", "c"}:
        assert is_marked(piece)
        assert is_marked(repr(piece))
        assert is_marked(json.dumps(piece))
        assert is_marked(piece.encode())
        if piece not in ("ab" + text[2:-1], "b" + text[2:-1], text[2:-1], text[2:], text[1:], text):
            with pytest.raises(DeferredReadError, match=r"the text .* was cut"):
                filled_in(piece)
    assert not is_marked("ä\U0010f9ff\\U0010f9ff")


class Meter:
    """Adds up, as meters of scripts do."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.total: Any = 0
        self.text = ""


def test_what_a_step_leaves_elsewhere_is_known_when_it_has_returned() -> None:
    def run() -> Any:
        meter = Meter()

        def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = loss_of(model, x, y)
            model.backward(loss)
            meter.values.append(100 * loss.item())
            meter.total += loss.item()
            meter.text = f"{loss.item():.3f}"
            return loss, meter.total / 2  # on what another microbatch reads, which runs before

        (losses, halves), again = on_ranks(step, pipeline_parallel_degree=2)
        plain = [100 * each.item() for each in losses.outputs]
        known = meter.values[:MICROBATCHES]  # none of the trace
        assert len(meter.values) == 2 * MICROBATCHES
        assert [float(each) for each in known] == pytest.approx(plain)
        assert [each > 0 for each in known] == [True] * MICROBATCHES
        assert f"{known[0]:.1f} {known[0] + known[1]:.1f}" == f"{plain[0]:.1f} {sum(plain[:2]):.1f}"
        total = sum(loss.item() for each in (losses, again[0]) for loss in each.outputs)
        assert max(halves) <= sum(plain) / 200 + 1e-9 < max(again[1]) == meter.total / 2
        assert float(meter.total) == pytest.approx(total)
        assert meter.text == f"{again[0].outputs[-1].item():.3f}" == meter.text.strip()

    run_ranks(run, 2)


def test_a_known_value_is_as_good_as_a_number() -> None:
    def run() -> None:
        meter = Meter()

        def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            meter.total = loss_value(model, x, y)
            meter.values, meter.text = [meter.total], f"{meter.total}"
            return meter.total

        with torch.no_grad():
            value = on_ranks(step, steps=1, microbatches=1, pipeline_parallel_degree=2)[0][0]
        known = meter.total
        assert type(known) is not float
        assert torch.equal(torch.ones(1) * known, torch.ones(1) * value)
        assert torch.equal(torch.tensor(known), torch.tensor(value))
        assert torch.equal(torch.tensor([float(known)]), torch.tensor([value]))
        with pytest.raises(TypeError, match=r"becomes a plain one by float\(\)"):
            torch.tensor([known])
        assert numpy.float32(known) == numpy.float32(value)
        assert numpy.mean([known, known]) == value
        assert json.dumps({"loss": known}, default=float) == json.dumps({"loss": value})
        assert list(map(type, pickle.loads(pickle.dumps([known, meter.text])))) == [float, str]
        assert isinstance(known, numbers.Number)
        assert {known: 1, value: 2} == {value: 2}
        assert math.sqrt(known) == math.sqrt(value)
        assert sum(meter.values) == max(meter.values) == value

    run_ranks(run, 2)


def reading_model(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Trains with `Looks`."""
    loss = model(x.double()).square().mean()
    model.backward(loss)
    return loss.item()


class Looks(torch.nn.Module):
    """Decides by what it computes, as a router may."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) if x.sum().item() > -1e9 else x


def test_a_module_that_looks_at_values_is_placed_whole() -> None:
    def run() -> Any:
        import shardwright.torch as sw
        from shardwright.torch.step import step_function

        sw.init({**QUIET, "microbatches": 2, "pipeline_parallel_degree": 2})
        torch.manual_seed(0)
        model = sw.DistributedModel(torch.nn.Sequential(Looks(), Looks(), Looks(), Looks()).double())
        return step_function(reading_model, reads_late=True)(model, *batches(1)[0])

    one, other = run_ranks(run, 2)
    assert one == other
    assert len(one) == 2
