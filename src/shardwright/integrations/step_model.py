"""A model whose call is a whole step: forward, and in training the backward of its own loss.

A loss belongs to a microbatch, and the batch wants the mean over all of it. Let microbatch i have n_i labels
that count, and the mean loss l_i over them::

    loss of the batch = sum over i of (n_i / n) * l_i

The gradients are those of this sum, so they are exact for any number of ignored labels. Where the labels are
not known, the graph of the loss tells how microbatches count, as in every step function.

Loops of other libraries call the model and, lines later, ask for the backward of its loss. A pipeline cannot
stop in between, because it has several microbatches under way. So the call runs both. The loss that it
returns stands for that backward and for no other::

    outputs = model(**batch)         forward, and backward of outputs.loss, over all stages
    accelerator.backward(loss)       checks that this is that loss, times nothing
    optimizer.step()                 checks that the line above has run
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.torch.batch.step_output import StepOutput
from shardwright.torch.interception.glue import active_handler
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import map_tree


def backward_of(model: sw.DistributedModel, loss: Tensor, factor: float) -> Tensor:
    """Runs the backward of ``factor * loss`` in a step; returns the loss, as what is told of it."""
    model.backward(loss, None if factor == 1 else torch.full_like(loss, factor))
    return loss.detach()


def counted_labels(labels: Tensor, *, shifted: bool) -> Tensor:
    """The labels that a loss of transformers is the mean over."""
    return (labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(-100).sum(dtype=torch.float64)


def shifts_labels(module: nn.Module) -> bool:
    """Whether a model's own loss compares position i with label i + 1, as causal language models do."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return False
    if not isinstance(module, PreTrainedModel) or getattr(module.config, "is_encoder_decoder", False):
        return False
    return module.loss_function is ForCausalLMLoss


def own_loss(value: Tensor, asked: Callable[[Tensor], None]) -> Tensor:
    """A loss that gives gradients to no parameter; its backward tells `asked` what it was multiplied by."""
    result: Tensor = _OwnLoss.apply(value.detach().requires_grad_(), asked)  # type: ignore[no-untyped-call]
    return result


class _OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, asked: Callable[[Tensor], None]) -> Tensor:
        ctx.asked = asked
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.asked(gradient)
        return None, None


def is_factor(factor: Tensor, wanted: float) -> bool:
    """Whether a loss was multiplied by `wanted`, in a few products that were rounded to its type."""
    eps = max(torch.finfo(dtype).eps for dtype in (factor.dtype, torch.float32))
    return abs(float(factor) / wanted - 1) <= 4 * eps


_REMEDY = (
    "Its backward has run inside the call of the model, over all stages. To train on another loss, compute "
    "it and call model.backward(loss) in a function decorated with @sw.step."
)


_NUM_ITEMS = "num_items_in_batch"
"""The labels that count in all batches of an update, by which a model of transformers divides its loss."""


class StepModel(sw.DistributedModel):
    """A `DistributedModel` that may be called outside of step functions.

    In training mode with gradients, a call runs a step and leaves gradients; else it evaluates.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        accumulation: int = 1,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        training_outputs: bool = False,
        loss_reduction: Any = None,
    ):
        super().__init__(module)
        self.accumulation = accumulation
        self._autocast = autocast
        self._training_outputs = training_outputs
        self._awaits_backward = False
        self._factor = 1
        read: Any = sw.step(loss_reduction=loss_reduction)
        self._train, self._evaluate = read(self._train_microbatch), read(self._evaluate_microbatch)
        weighed: Any = partial(sw.step, non_split_inputs=["num_labels"])
        self._train_weighed = weighed(loss_reduction="sum")(self._train_weighed_microbatch)
        self._evaluate_weighed = weighed(loss_reduction="mean")(self._evaluate_weighed_microbatch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module inside a step function; else runs a step."""
        if active_handler() is not None:
            with self._autocast():
                return super().forward(*args, **kwargs)
        trains = torch.is_grad_enabled() and self.get_module().training
        if trains:
            self.refuse_waiting("the model is called again")
        num_labels = self._num_labels(kwargs)
        if kwargs.get(_NUM_ITEMS) is not None:
            num_labels = _of_update(kwargs[_NUM_ITEMS], num_labels)
            kwargs = {**kwargs, _NUM_ITEMS: True}  # each microbatch is told its own
        if num_labels is None:
            outputs, loss = (self._train if trains else self._evaluate)(args, kwargs)
        else:
            run = self._train_weighed if trains else self._evaluate_weighed
            outputs, loss = run(args, kwargs, num_labels=num_labels)
        outputs = map_tree(_whole, outputs)
        mean = _loss_of(outputs)  # over the microbatches, whatever their shares
        if loss is None or mean is None:
            return outputs
        value = (loss.reduce_mean() if num_labels is None else loss.reduce_sum()).to(mean.dtype)
        if trains:
            self._awaits_backward = True
            self._factor = self._factor_of(kwargs)
            value = own_loss(value, self.backward_asked)
        return _with_loss(outputs, value)

    def refuse_waiting(self, event: str) -> None:
        """Refuses to go on before the loop has asked for the backward of the last loss."""
        if self._awaits_backward:
            raise UsageError(
                f"{user_line()}: {event}, and nothing has asked for the backward of the loss before. Its "
                "gradients are there already: the call of the model has computed them. Call "
                "accelerator.backward(loss) right after the model, and optimizer.zero_grad() before the "
                "model or after optimizer.step(). What is not trained on is computed under torch.no_grad()."
            )

    def backward_asked(self, factor: Tensor) -> None:
        """Notes that the loop has asked for the backward of the loss."""
        if not self._awaits_backward:
            raise UsageError(f"{user_line()}: this is the second backward of one loss. {_REMEDY}")
        if not is_factor(factor, self._factor / self.accumulation):
            wanted = (
                "" if self._factor == 1 else f", and not by {self._factor} (calls of an update * replicas)"
            )
            raise UsageError(
                f"{user_line()}: the loss was multiplied by {float(factor) * self.accumulation:g} before "
                f"accelerator.backward(loss){wanted}. {_REMEDY} To accumulate over batches, set "
                "Accelerator(gradient_accumulation_steps=...), and divide nothing; or give the model "
                f"{_NUM_ITEMS}, and multiply its loss by accelerator.gradient_accumulation_steps * "
                "accelerator.num_processes."
            )
        self._awaits_backward = False

    # ---- inside ----

    def _train_microbatch(self, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
        outputs, loss = self._called(args, kwargs)
        return outputs, backward_of(self, loss, 1 / self.accumulation)

    def _train_weighed_microbatch(self, args: Any, kwargs: Any, num_labels: Tensor) -> tuple[Any, Tensor]:
        outputs, loss = self._called(args, self._with_own_items(kwargs))
        share = self._own_labels(kwargs) / num_labels
        factor = self._factor_of(kwargs) / self.accumulation / sw.rdp_size()  # replicas add up, as a sum does
        return outputs, backward_of(self, loss * share, factor)

    def _called(self, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
        """What the module returns of a microbatch in training, and its loss."""
        outputs = self(*args, **kwargs)
        loss = _loss_of(outputs)
        if loss is None:
            raise UsageError(
                f"the model returns no loss, but {type(outputs).__name__}, so its call cannot train. Give it "
                f"labels. {_REMEDY}"
            )
        return map_tree(_kept if self._training_outputs else _number, outputs), loss

    def _evaluate_microbatch(self, args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
        outputs = self(*args, **kwargs)
        return map_tree(_kept, outputs), _loss_of(outputs)

    def _evaluate_weighed_microbatch(
        self, args: Any, kwargs: Any, num_labels: Tensor
    ) -> tuple[Any, Tensor | None]:
        outputs = self(*args, **self._with_own_items(kwargs))
        loss = _loss_of(outputs)
        if loss is not None:
            loss = loss * (self._own_labels(kwargs) / num_labels)
        return map_tree(_kept, outputs), loss

    def _factor_of(self, kwargs: Mapping[str, Any]) -> int:
        """What the loop multiplies the loss by: with items, it undoes the means over calls and replicas."""
        return 1 if kwargs.get(_NUM_ITEMS) is None else self.accumulation * sw.rdp_size()

    def _with_own_items(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With the labels of the microbatch that count in the place of those of the update."""
        if kwargs.get(_NUM_ITEMS) is None:
            return kwargs
        return {**kwargs, _NUM_ITEMS: self._own_labels(kwargs)}

    def _own_labels(self, kwargs: Mapping[str, Any]) -> Tensor:
        """The labels of a microbatch that count; 1 where none does: its loss may be divided by it."""
        return counted_labels(kwargs["labels"], shifted=shifts_labels(self.get_module())).clamp(min=1)

    def _num_labels(self, kwargs: Mapping[str, Any]) -> Tensor | None:
        labels = kwargs.get("labels")
        is_known = isinstance(labels, Tensor) and not labels.dtype.is_floating_point
        return self._own_labels(kwargs) if is_known else None


def _of_update(num_items: Any, num_labels: Tensor | None) -> Tensor:
    """The labels that count in an update, as one number."""
    if num_labels is None:
        raise UsageError(
            f"{user_line()}: the model is given {_NUM_ITEMS} without labels (a tensor of whole numbers, by "
            "keyword), so the share of a microbatch is not known. Give it labels=..., or compute the loss in "
            "a function decorated with @sw.step."
        )
    return torch.as_tensor(num_items, dtype=torch.float64).reshape(()).to(num_labels.device)


class _LeftOut:
    """An output that a training call does not return."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "a call of the model in training returns its loss and other single numbers; sending everything "
            "to all ranks takes time. Evaluate with model.eval() under torch.no_grad(), or ask for "
            "everything: Accelerator(training_outputs=True)."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        cls()._refuse()

    __getitem__ = __len__ = __iter__ = __float__ = _refuse


def _loss_of(outputs: Any) -> Tensor | None:
    """The loss that a module returns; None without."""
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "loss", None) if not isinstance(outputs, Tensor) else outputs
    return found if isinstance(found, Tensor) and not found.dim() else None


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The same outputs with another loss."""
    if isinstance(outputs, dict):
        outputs["loss"] = loss  # a ModelOutput sets its attribute, too
        return outputs
    if isinstance(outputs, tuple | list):
        return type(outputs)((loss, *outputs[1:]))
    if isinstance(outputs, Tensor):
        return loss
    outputs.loss = loss
    return outputs


def _number(item: Any) -> Any:
    """Tensors with one number alone."""
    return item if isinstance(item, Tensor) and not item.dim() else None


def _kept(item: Any) -> Any:
    """Tensors and plain values: microbatches of them can be put together, unlike a cache of keys."""
    return item if isinstance(item, Tensor | int | float | str) else None


def _whole(item: Any) -> Any:
    """One output of the batch from those of its microbatches."""
    if isinstance(item, StepOutput):
        return item.concat() if item[0].dim() else item.reduce_mean()
    return _LeftOut() if item is None else item
