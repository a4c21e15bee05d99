"""A model whose call is a step: the gradients of a plain loop, and what loops do that it must refuse."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.integrations.step_model import StepModel


class Tagger(nn.Module):
    """Tags each position; returns what it is asked to."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7, dtype=torch.float64)
        self._kind = kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> object:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {
            "dict": {"loss": loss, "logits": logits},
            "tuple": (loss, logits),
            "loss": loss,
            "logits": logits,
        }[self._kind]


@pytest.fixture
def run() -> Iterator[None]:
    sw.init({"microbatches": 3, "run_dir": "off", "plan_one_stage": False})
    yield
    sw.shutdown()


def batch() -> tuple[Tensor, Tensor]:
    """Eight samples, in microbatches of 3, 3 and 2; of some, the last labels do not count."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (8, 4), generator=generator)
    for number in range(8):
        labels[number, 4 - number % 4 :] = -100
    return x, labels


def loss_of(outputs: object) -> Tensor:
    if isinstance(outputs, dict):
        found: Tensor = outputs["loss"]
        return found
    return outputs[0] if isinstance(outputs, tuple) else outputs  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["dict", "tuple", "loss"])
def test_a_call_leaves_the_gradients_of_a_plain_loop(run: None, kind: str) -> None:
    x, labels = batch()
    plain = Tagger(kind)
    expected = loss_of(plain(x, labels=labels))
    expected.backward()
    model = StepModel(Tagger(kind))
    loss = loss_of(model(x, labels=labels))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(model.get_module().body.weight.grad, plain.body.weight.grad, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_that_the_call_does_not_name(run: None, reduction: str) -> None:
    """Microbatches were weighed by their samples, whatever counted in the loss of each."""

    class Unnamed(Tagger):
        def forward(self, x: Tensor, labels: Tensor) -> object:  # type: ignore[override]
            logits = self.body(x).flatten(0, 1)
            return (nn.functional.cross_entropy(logits, labels.flatten(), reduction=reduction),)

    x, labels = batch()
    plain = Unnamed()
    for half in (slice(0, 4), slice(4, 8)):
        (loss_of(plain(x[half], labels[half])) / 2).backward()
    model, losses = StepModel(Unnamed(), accumulation=2), []
    for half in (slice(0, 4), slice(4, 8)):
        losses.append(loss_of(model(x[half], labels[half])))
        (losses[-1] / 2).backward()
    assert torch.allclose(model.get_module().body.weight.grad, plain.body.weight.grad, atol=1e-12)
    assert losses[0].item() == pytest.approx(loss_of(plain(x[:4], labels[:4])).item(), abs=1e-12)


def test_accumulated_calls_leave_their_mean(run: None) -> None:
    x, labels = batch()
    plain = Tagger()
    for half in (slice(0, 4), slice(4, 8)):
        (plain(x[half], labels=labels[half])["loss"] / 2).backward()
    model = StepModel(Tagger(), accumulation=2)
    for half in (slice(0, 4), slice(4, 8)):
        (model(x[half], labels=labels[half])["loss"] / 2).backward()
    assert torch.allclose(model.get_module().body.weight.grad, plain.body.weight.grad, atol=1e-12)


def test_evaluation_returns_the_outputs_of_the_batch(run: None) -> None:
    x, labels = batch()
    plain = Tagger()(x, labels=labels)
    model = StepModel(Tagger())
    with torch.no_grad():
        outputs = model(x, labels=labels)
        unlabelled = model(x)
    assert torch.allclose(outputs["logits"], plain["logits"])
    assert outputs["loss"].item() == pytest.approx(plain["loss"].item(), abs=1e-12)
    assert torch.equal(unlabelled["logits"], outputs["logits"])
    assert model.get_module().body.weight.grad is None


class Counted(Tagger):
    """Divides its loss by the labels of the whole update, as models of transformers do when told."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: object = None) -> object:  # type: ignore[override]
        logits = self.body(x).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)}


def test_a_loss_divided_by_the_labels_of_an_update(run: None) -> None:
    """It was weighed once more, by the labels of its microbatches, and the factor of the loop was refused."""
    x, labels = batch()
    num_items = int(labels.ne(-100).sum())
    plain = Counted()
    plain(x, labels, num_items)["loss"].backward()
    model = StepModel(Counted(), accumulation=2)
    for half in (slice(0, 3), slice(3, 8)):
        loss = model(x[half], labels=labels[half], num_items_in_batch=num_items)["loss"]
        (loss * 2 / 2).backward()  # the loop's factor, and Accelerate's
    assert torch.allclose(model.get_module().body.weight.grad, plain.body.weight.grad, atol=1e-12)
    loss = model(x, labels=labels, num_items_in_batch=num_items)["loss"]
    with pytest.raises(UsageError, match=r"multiplied by 1 .*not by 2 \(calls of an update \* replicas\)"):
        (loss / 2).backward()


def test_logits_in_training_are_left_out_unless_asked_for(run: None) -> None:
    x, labels = batch()
    outputs = StepModel(Tagger())(x, labels=labels)
    for use in (lambda: outputs["logits"].argmax(-1), lambda: torch.argmax(outputs["logits"])):
        with pytest.raises(UsageError, match="training_outputs=True"):
            use()


def test_logits_in_training_that_were_asked_for(run: None) -> None:
    x, labels = batch()
    outputs = StepModel(Tagger(), training_outputs=True)(x, labels=labels)
    assert torch.allclose(outputs["logits"], Tagger()(x)["logits"])


def test_a_model_without_a_loss_cannot_train_by_its_call(run: None) -> None:
    model = StepModel(Tagger("logits"))
    x, labels = batch()
    with pytest.raises(UsageError, match="returns no loss"):
        model(x, labels=labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_factor_that_the_type_of_the_loss_rounds(run: None, dtype: torch.dtype) -> None:
    """A third in bfloat16, times 3, is 1.00195: it was taken for a factor of the loop."""
    x, labels = batch()
    model = StepModel(Tagger().to(dtype), accumulation=3)
    loss = model(x.to(dtype), labels=labels)["loss"]
    assert loss.dtype == dtype
    (loss.float() / 3).backward()
    loss = model(x.to(dtype), labels=labels)["loss"]
    with pytest.raises(UsageError, match=r"multiplied by 1\.1"):
        (loss * 1.1 / 3).backward()


def test_an_evaluation_between_a_loss_and_its_backward(run: None) -> None:
    """The factor of the loss was forgotten, and the one that the loop had to give was refused."""
    x, labels = batch()
    model = StepModel(Counted(), accumulation=2)
    loss = model(x, labels=labels, num_items_in_batch=int(labels.ne(-100).sum()))["loss"]
    with torch.no_grad():
        model(x, labels=labels)
    (loss * 2 / 2).backward()
    model.refuse_waiting("the loop goes on")
