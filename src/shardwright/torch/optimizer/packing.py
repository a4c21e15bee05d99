"""Keeps the moments of an optimizer in fewer bits (`optimizer_state`).

The wrapped optimizer updates a few pieces of parameters at a time: for these alone, moments are unpacked::

    moments, packed     | piece 0 | piece 1 | piece 2 | ...
                             |         ^
                         unpacked    packed        while the optimizer asks for its next group
                             v         |
    optimizer.step()     its update of piece 0

It sees more groups, of fewer parameters, which are flat pieces of this rank's parts of the real ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.torch.optimizer.packed_tensor import Format, PackedTensor
from shardwright.torch.tensor_parallel.divide import divided_alike, part_as
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

# What is averaged over steps, so that errors of rounding die out. Sums and maxima stay as they are.
_SIGNED, _UNSIGNED = ("exp_avg", "momentum_buffer", "grad_avg"), ("exp_avg_sq", "square_avg", "acc_delta")
_PACKED = {
    getattr(torch.optim, name) for name in "SGD Adam AdamW NAdam RAdam Adamax Adadelta RMSprop".split()
}
_NOT_IN_PIECES = ("capturable", "differentiable")

_PIECE, _PIECE_ON_ACCELERATORS = 2**18, 2**23


class Packing:
    """The packed moments of one optimizer.

    Args:
        kind: the setting, ``bf16`` or ``8bit``.
        seed: of the run.
    """

    def __init__(self, optimizer: Optimizer, kind: str, seed: int | None):
        self._optimizer = optimizer
        self._kind = kind
        self._seed = seed or 0
        _refuse_others(optimizer, kind)
        self._in_pieces: _Groups | None = None
        # A hook of a step may ask for the state: that of parameters, and not of pieces.
        optimizer.register_state_dict_pre_hook(self._show_parameters)
        optimizer.register_state_dict_post_hook(self._show_pieces)

    @classmethod
    def of(cls, optimizer: Optimizer, config: Config) -> "Packing | None":
        """That which the settings ask for."""
        kind = config.optimizer_state
        return None if kind == "as_is" else cls(optimizer, kind, config.seed)

    @contextmanager
    def in_pieces(self) -> Iterator[None]:
        """The optimizer updates pieces."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = _Groups(self, groups, self._salt())  # type: ignore[assignment]
        try:
            yield
        finally:
            optimizer.param_groups = groups

    def _show_parameters(self, optimizer: Optimizer) -> None:
        groups: Any = optimizer.param_groups
        if isinstance(groups, _Groups):
            self._in_pieces = groups
            optimizer.param_groups = [groups[number] for number in range(len(groups))]

    def _show_pieces(self, optimizer: Optimizer, _: dict[str, Any]) -> None:
        if self._in_pieces is not None:
            optimizer.param_groups = self._in_pieces  # type: ignore[assignment]
            self._in_pieces = None

    def pack(self, parameters: Iterable[nn.Parameter]) -> None:
        """Packs moments that were loaded."""
        state = self._optimizer.state
        for parameter in parameters:
            for key, value in state.get(parameter, {}).items():
                state[parameter][key] = self.packed(key, value)

    def packed(self, key: str, value: Any) -> Any:
        """A value of the state as it is kept."""
        return self._packed(key, value, self._salt())

    def _salt(self) -> int:
        """Another number after each step of the run, also after one that goes on from a checkpoint."""
        reporter = context().reporter
        step = 0 if reporter is None else reporter.num_steps
        return int.from_bytes(sha256(f"{self._seed} {step}".encode()).digest()[:4], "little", signed=True)

    def _packed(self, key: str, value: Any, salt: int) -> Any:
        own = local_of(value) if isinstance(value, Tensor) else value
        kind = self._format(key, own)
        if kind is None or isinstance(own, PackedTensor):
            return value
        packed = PackedTensor.empty(own, kind, own.device)
        flat, size = own.reshape(-1), _piece_size(own)
        for start in range(0, flat.numel(), size):
            packed.write(start, flat[start : start + size], salt)
        return divided_alike(packed, value) if isinstance(value, DividedTensor) else packed

    def _format(self, key: str, value: Any) -> Format | None:
        if key not in _SIGNED + _UNSIGNED or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        if value.layout is not torch.strided:
            return None
        if self._kind == "bf16":
            return "bf16" if value.itemsize > 2 else None
        return "signed" if key in _SIGNED else "unsigned"

    # ---- one piece after the other ----

    def pieces(self, group: Mapping[str, Any], salt: int) -> Iterator[dict[str, Any]]:
        """Groups of pieces of the parameters of a group, whose state is there until the next is asked for."""
        together: list[_Piece] = []
        for piece in (piece for parameter in group["params"] for piece in self._pieces_of(parameter, salt)):
            together.append(piece)
            if sum(each.shown.numel() for each in together) >= _piece_size(piece.shown):
                yield from self._at_once(group, together, salt)
                together = []
        if together:
            yield from self._at_once(group, together, salt)

    def _pieces_of(self, parameter: nn.Parameter, salt: int) -> "Iterator[_Piece]":
        values = self._optimizer.state.get(parameter, {})
        values.update((key, self._packed(key, value, salt)) for key, value in values.items())
        yield from _pieces_of(parameter, dict(values))

    def _at_once(
        self, group: Mapping[str, Any], pieces: "list[_Piece]", salt: int
    ) -> Iterator[dict[str, Any]]:
        state = self._optimizer.state
        try:
            for piece in pieces:
                state[piece.shown] = {key: piece.of(value) for key, value in piece.before.items()}
            yield {**group, "params": [piece.shown for piece in pieces]}
            for piece in pieces:
                self._take_back(piece, state[piece.shown], salt)
        finally:
            for piece in pieces:
                state.pop(piece.shown, None)

    def _take_back(self, piece: "_Piece", values: Mapping[str, Any], salt: int) -> None:
        parameter, kept = piece.parameter, self._optimizer.state[piece.parameter] if values else {}
        for key, value in values.items():
            kind = self._format(key, value)
            if not kind and not piece.is_part(value):
                kept[key] = value
                continue
            if key not in kept:
                like = local_of(parameter).detach()
                like = torch.empty_like(like, dtype=value.dtype, device="meta" if kind else None)
                own = PackedTensor.empty(like, kind, value.device) if kind else like
                kept[key] = divided_alike(own, parameter) if isinstance(parameter, DividedTensor) else own
            own = local_of(kept[key])
            if isinstance(own, PackedTensor):
                own.write(piece.start, value.reshape(-1), salt)
            else:
                piece.part_of(own).copy_(value)


class _Groups:
    """The groups that an optimizer sees while it updates pieces."""

    def __init__(self, packing: Packing, groups: Sequence[dict[str, Any]], salt: int):
        self._packing, self._groups, self._salt = packing, groups, salt

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A group as the script knows it, for hooks that look at its settings."""
        return self._groups[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self._groups:
            yield from self._packing.pieces(group, self._salt)


class _Piece(NamedTuple):
    """A range of this rank's part of a parameter, and what an optimizer sees of it.

    Attributes:
        before: the state of the parameter before the update of its first piece.
    """

    parameter: nn.Parameter
    before: Mapping[str, Any]
    start: int
    shown: nn.Parameter
    is_flat: bool

    def part_of(self, own: Tensor) -> Tensor:
        """The same range of a tensor like the parameter."""
        return own.view(-1)[self.start : self.start + self.shown.numel()] if self.is_flat else own

    def of(self, value: Any) -> Any:
        """What the state has for this piece."""
        if not isinstance(value, Tensor):
            return value
        own = local_of(value)
        if not own.dim() and not isinstance(own, PackedTensor):
            return own.clone()  # a step, which each piece counts
        if isinstance(own, PackedTensor):
            found = own.read(self.start, self.start + self.shown.numel()).view(self.shown.shape)
            return found if self.is_flat else torch.empty_like(self.shown, dtype=found.dtype).copy_(found)
        return self.part_of(own) if own.shape == local_of(self.parameter).shape else value

    def is_part(self, value: Any) -> bool:
        """Whether a value of the state has an element for each of the piece."""
        return isinstance(value, Tensor) and value.shape == self.shown.shape and bool(value.dim())


def _pieces_of(parameter: nn.Parameter, before: Mapping[str, Any]) -> Iterator[_Piece]:
    """Flat pieces of what this rank updates of a parameter, or all of it as it is."""
    if parameter.grad is None:
        return
    own, gradient = local_of(parameter).detach(), parameter.grad
    if isinstance(parameter, DividedTensor):
        gradient = local_of(part_as(gradient, parameter._spec))
    if not own.dim() or not own.is_contiguous() or gradient.layout is not torch.strided:
        yield _Piece(parameter, before, 0, _shown(parameter, own, gradient), is_flat=False)
        return
    size, own, gradient = _piece_size(own), own.view(-1), gradient.reshape(-1)
    for start in range(0, max(1, own.numel()), size):
        shown = _shown(parameter, own[start : start + size], gradient[start : start + size])
        yield _Piece(parameter, before, start, shown, is_flat=True)


def _shown(parameter: nn.Parameter, own: Tensor, gradient: Tensor) -> nn.Parameter:
    shown = nn.Parameter(own, parameter.requires_grad)
    if gradient.dtype is not own.dtype:
        shown.grad_dtype = gradient.dtype
    shown.grad = gradient
    return shown


def _piece_size(tensor: Tensor) -> int:
    """Elements that are updated at a time: on CPUs as many as caches hold."""
    return _PIECE if tensor.device.type == "cpu" else _PIECE_ON_ACCELERATORS


def _refuse_others(optimizer: Optimizer, kind: str) -> None:
    """Refuses an optimizer that may need more than a piece, or that keeps nothing that could be packed."""
    name = type(optimizer).__name__
    remedy = "Set optimizer_state to as_is"
    if type(optimizer) not in _PACKED:
        names = ", ".join(sorted(each.__name__ for each in _PACKED))
        raise UsageError(
            f"optimizer_state is {kind}, which keeps the averages of optimizers that treat each element by "
            f"itself, and {name} is not known to be one. {remedy}, or use one of torch.optim's {names}."
        )
    if any(group.get("centered") for group in optimizer.param_groups):
        raise UsageError(
            f"optimizer_state is {kind}, and {name} has centered=True: it takes the root of a difference of "
            f"two averages, which rounding makes negative. {remedy}, or leave centered out."
        )
    for option in _NOT_IN_PIECES:
        if any(group.get(option) for group in optimizer.param_groups):
            raise UsageError(
                f"optimizer_state is {kind}, so that {name} updates a few pieces of parameters at a time, "
                f"and it has {option}=True, which needs all in place. {remedy}, or leave {option} out."
            )
