"""Heads that leave their logits to a loss (`loss_chunks`): which do, when, and in how many pieces."""

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.after_import import after_import
from shardwright.torch._private.modules import backward_in_progress, saved_tensor_hooks
from shardwright.torch._private.tensors import FakeTensor, function_transforms_active, outside_of_modes
from shardwright.torch.backward.pending_logits import PendingLogits, whole_logits
from shardwright.torch.backward.pending_losses import Logits
from shardwright.torch.pytorch.modules import user_line

log = logging.getLogger(__name__)

_LEAST_BYTES = 2**24
_LEAST_WORDS = 2**10  # a call of a smaller layer is not to pay for the question


class _Heads:
    """The types of what heads may be given, to leave their logits to a loss just now."""

    may_wait_with: tuple[type, ...] = ()


@contextmanager
def no_head_waits() -> Iterator[None]:
    """Has all heads compute their logits at once."""
    before, _Heads.may_wait_with = _Heads.may_wait_with, ()
    try:
        yield
    finally:
        _Heads.may_wait_with = before


@contextmanager
def heads_may_wait(*, on_fakes: bool = False) -> Iterator[None]:
    """Has heads that are marked (`mark_heads`) leave their logits to the loss."""
    kind: Any = torch.autograd.Function
    before, original = _Heads.may_wait_with, kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(item.__class__ is PendingLogits for item in args):  # past `__torch_function__`
            args = tuple(map(whole_logits, args))
        with no_head_waits():  # what it makes has a gradient of its own
            return MethodType(original.__func__, cls)(*args, **kwargs)

    _Heads.may_wait_with = (Tensor, FakeTensor) if on_fakes else (Tensor,)
    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        _Heads.may_wait_with, kind.apply = before, original


class _WaitingForward:
    """The forward of a head, in its place.

    Args:
        pieces: of the rows of a microbatch; None: as many as save memory, and take no longer.
        sizes: inputs and outputs of the head, which may be half a copy yet.
    """

    def __init__(self, head: nn.Linear, name: str, pieces: int | None, sizes: tuple[int, int]):
        # Weakly: the head has this object, and a copy that was timed would stay with its weight for a while.
        self._head_of = weakref.ref(head)
        self._name = name
        self._pieces = pieces
        self._sizes = sizes
        self._gave_whole: set[bool] = set()  # whether gradients were recorded
        self._told = False

    @property
    def _head(self) -> nn.Linear:
        head = self._head_of()
        assert head is not None  # it has this object
        return head

    def __call__(self, input: Tensor) -> Tensor:
        x, head = input, self._head
        if torch.compiler.is_dynamo_compiling() or (dtype := self._waits_in(x)) is None:
            return type(head).forward(head, x)
        with outside_of_modes():
            shape = torch.empty((*x.shape[:-1], head.out_features), dtype=dtype, device="meta")
        weight, bias = head.weight, head.bias
        given = (x, weight) if bias is None else (x, weight, bias)
        return PendingLogits.like(
            shape,
            Logits(
                head=self,
                x=x,
                weight=weight,
                bias=bias,
                dtype=dtype,
                given=tuple((each, each._version) for each in given),
                trains=torch.is_grad_enabled() and any(each.requires_grad for each in given),
            ),
        )

    def _waits_in(self, x: Tensor) -> torch.dtype | None:
        """The type of logits that wait; None where they are computed now."""
        if type(x) not in _Heads.may_wait_with or x.dim() < 2 or not x.numel():
            return None
        if self._pieces is None and torch.is_grad_enabled() in self._gave_whole:
            return None
        if not self.waits_with(x.numel() // x.shape[-1], x.element_size()):
            return None
        weight = self._head._parameters.get("weight")  # None where it is computed whenever it is asked for
        if weight is None or x.is_inference() or function_transforms_active() or _runs_twice():
            return None
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            return torch.get_autocast_dtype(x.device.type)
        return x.dtype if x.dtype is weight.dtype else None

    def waits_with(self, num_rows: int, num_bytes: int) -> bool:
        """Whether it leaves the logits of so many rows to a loss, of numbers of so many bytes."""
        if self._pieces is None and num_rows * self._sizes[1] * num_bytes < _LEAST_BYTES:
            return False
        return self.rows_of_piece(num_rows) < num_rows

    def of(self, head: nn.Linear) -> "_WaitingForward":
        """The same for another head."""
        return _WaitingForward(head, self._name, self._pieces, self._sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WaitingForward":
        return self.of(copy.deepcopy(self._head, memo))

    def __reduce__(self) -> Any:
        """Who loads a module that was pickled whole has a plain head, and need not have this library."""
        return getattr, (self._head, "forward")

    def rows_of_piece(self, num_rows: int) -> int:
        """So many that their logits take half the memory of the weight, whose gradient is kept, too."""
        if self._pieces is not None:
            return -(-num_rows // self._pieces)
        return max(self._sizes[0] // 2, 1)

    def gave_whole(self, *, trains: bool) -> None:
        """The script uses logits otherwise than in a loss, too: next time they are computed by the head."""
        self._gave_whole.add(trains)
        if self._pieces is not None and not self._told:
            self._told = True
            log.warning(
                "%s: the logits of %s are used here otherwise than in a loss, so they are computed whole: "
                "loss_chunks saves no memory",
                user_line(),
                self._name or "the model",
            )


def waiting_head(module: nn.Module, num_rows: int) -> "nn.Linear | None":
    """The module, if it is a head that leaves the logits of so many rows to a loss."""
    own = module.__dict__.get("forward")
    if not isinstance(own, _WaitingForward) or not isinstance(module, nn.Linear):
        return None
    return module if own.waits_with(num_rows, module.weight.element_size()) else None


def wait_like(head: nn.Linear, other: nn.Linear) -> None:
    own: _WaitingForward = other.__dict__["forward"]
    head.__dict__["forward"] = own.of(head)


def _runs_twice() -> bool:
    """Whether this is a forward that ``torch.utils.checkpoint`` repeats, or repeats just now."""
    hooks = saved_tensor_hooks()
    is_first = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return is_first or backward_in_progress() >= 0


def waits_for_loss(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether it leaves its logits to a loss; then it keeps nothing that a recomputation would save."""
    own = module.__dict__.get("forward")
    if not isinstance(own, _WaitingForward) or len(args) != 1 or not isinstance(args[0], Tensor):
        return False
    return own._waits_in(args[0]) is not None


def mark_heads(model: nn.Module, chunks: int | str) -> list[str]:
    """Has the linear layers with the most outputs of all leave their logits to the loss; returns their names.

    Others gain nothing: where logits are no more than what layers keep.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    most = max((module.out_features for module in linear.values()), default=0)
    if chunks == "off" or (chunks == "auto" and most < _LEAST_WORDS):
        return []
    found = []
    for name, module in linear.items():
        own = module.__dict__.get("forward")
        is_plain = own is None or getattr(own, "__func__", None) is nn.Linear.forward
        is_plain &= module._parameters.get("weight") is not None
        has_hooks = module._forward_hooks or module._backward_hooks or module._forward_pre_hooks
        if module.out_features != most or has_hooks:
            continue
        if is_plain:
            pieces = None if chunks == "auto" else int(chunks)
            sizes = module.in_features, module.out_features
            module.__dict__["forward"] = _WaitingForward(module, name, pieces, sizes)
        if is_plain or isinstance(own, _WaitingForward):
            found.append(name)
    return found


def _leave_to_python(dynamo: Any) -> None:
    """Code that is compiled gets logits whole: what traces it would look for memory that they have not."""
    dynamo.config.nontraceable_tensor_subclasses.add(PendingLogits)
    kind: Any = PendingLogits
    kind.__torch_function__ = classmethod(dynamo.disable(kind.__torch_function__.__func__))


after_import("torch._dynamo", _leave_to_python)
