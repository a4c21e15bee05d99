"""Checks every operation on divided tensors against the same operation on whole ones, on all ranks.

A wrong rule makes no noise: the loss is a little off. So for a step, or for all, each operation also runs on
gathered inputs; the first whose results differ is named, with its placements and the line of the script.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import VerificationError
from shardwright.torch._private import newest_node, running_node
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.tensor_parallel.call import Call, map_tensors, tensors_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole
from shardwright.torch.tensor_parallel.group import TensorGroup, Traffic
from shardwright.torch.tensor_parallel.spec import local_shape

__all__ = ["Verification", "verified"]

# The largest difference, as a share of the numbers concerned: sums in another order round otherwise.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Numbers beyond are masks (the least number there is), not values.
_MASK = 1e10


@contextmanager
def verified(group: TensorGroup) -> Iterator[None]:
    """Checks each operation on this group's tensors, forward and backward, inside. All ranks enter together.

    Raises:
        VerificationError: from the first operation that gives other numbers than the whole one, on all ranks.
    """
    group.verification = Verification(group)
    try:
        yield
    finally:
        group.verification = None


class Verification:
    """Runs operations twice and compares.

    Attributes:
        num_checked: operations whose results were compared.
    """

    def __init__(self, group: TensorGroup):
        self._group = group
        self.num_checked = 0
        self._lines: dict[int, str] = {}  # that made each node of autograd

    def run(self, decision: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation as decided, and on whole tensors."""
        group = self._group
        group.verification = None
        try:
            if "empty" in str(func._schema.name):
                return decision.run(args, kwargs)
            if running_node() is None:
                self._lines.setdefault(newest_node(), user_line())
            call = Call(func, args, kwargs, group)
            with _uncounted(group):
                wholes = [_whole_copy(tensor) for tensor in tensors_of(args, kwargs)]
                scale = max((_typical(each) for each in wholes), default=0.0)
                wanted = self._wanted(func, args, kwargs, wholes)
            results = decision.run(args, kwargs)
            written = [each for index, each in enumerate(tensors_of(args, kwargs)) if index in call.written]
            wanted += [each for index, each in enumerate(wholes) if index in call.written]
            with _uncounted(group):
                self._compare(call, [*_tensors(results), *written], wanted, scale)
            self.num_checked += 1
            return results
        finally:
            group.verification = self

    def _wanted(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], wholes: list[Tensor]
    ) -> list[Tensor]:
        """The results of the whole operation, which may change its inputs in place."""
        upcoming = iter(wholes)
        whole_args = [map_tensors(lambda _: next(upcoming), value) for value in args]
        whole_kwargs = {key: map_tensors(lambda _: next(upcoming), value) for key, value in kwargs.items()}
        with _same_draws(func, kwargs):
            return _tensors(func(*whole_args, **whole_kwargs))

    def _compare(self, call: Call, found: list[Tensor], wanted: list[Tensor], scale: float) -> None:
        problems = [self._problem(a, b, scale) for a, b in zip(found, wanted, strict=True)]
        sums = torch.tensor([_checksum(each) for each in wanted] or [0.0], dtype=torch.float64)
        apart = self._group.reduce(sums.clone(), "max") - self._group.reduce(sums.clone(), "min")
        if (apart > 1e-6 * (1 + sums.abs())).any():
            problems.insert(0, "the ranks have different numbers in tensors that should be whole")
        problem = next((each for each in problems if each), "")
        if self._group.reduce(torch.tensor([float(bool(problem))]), "max").item():
            raise VerificationError(
                f"{call.func} differs from the whole operation on rank {self._group.rank} of "
                f"{self._group.num_ranks}: {problem or 'equal here, but not on another rank'}.\n"
                f"  tensors: {', '.join(f'{tuple(one.shape)} {one.placement}' for one in call.inputs)}\n"
                f"  arguments: {_scalars(call)}\n"
                f"  called from {self._line()}\n"
                "This is a bug of Shardwright. Until it is mended, keep the parameters of this module whole."
            )

    def _line(self) -> str:
        node = running_node()
        if node is None:
            return user_line()
        return f"{self._lines.get(node, 'an unknown line')} (in its backward)"

    def _problem(self, found: Tensor, wanted: Tensor, scale: float) -> str:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"{tuple(found.shape)} {found.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        if isinstance(found, DividedTensor):
            spec = found._spec
            expected = local_shape(tuple(spec.shape), spec.placement, spec.group.rank)
            if tuple(found._local.shape) != expected:
                return f"a part of {tuple(found._local.shape)} instead of {expected}"
        values = whole(found)
        if not values.numel() or values.is_sparse:
            return ""
        if not (values.is_floating_point() or values.is_complex()):
            return "" if torch.equal(values, wanted) else "other whole numbers"
        same = (values == wanted) | (values.isnan() & wanted.isnan())
        difference = torch.where(same, 0.0, (values - wanted).abs().double()).max()
        base = values.dtype.to_real() if values.is_complex() else values.dtype
        allowed = _TOLERANCE.get(base, 1e-2) * max(scale, _greatest(wanted))
        if difference <= allowed:
            return ""
        return f"a difference of {float(difference):.1e}, where {allowed:.1e} may come from rounding"


def _whole_copy(tensor: Tensor) -> Tensor:
    """A copy of all elements, in memory as the script's tensor says it is."""
    values = whole(tensor)
    size = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if not values.numel() or values.layout != torch.strided:
        return values.clone()
    copy = values.new_zeros(size).as_strided(tensor.shape, tensor.stride())
    stretched = [0 if step == 0 else slice(None) for step in tensor.stride()]
    copy[tuple(stretched)] = values[tuple(stretched)]
    return copy


@contextmanager
def _uncounted(group: TensorGroup) -> Iterator[None]:
    """What the check itself sends is none of the step's traffic."""
    counted, group.traffic = group.traffic, Traffic()
    yield
    group.traffic = counted


@contextmanager
def _same_draws(func: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Leaves the generators as they were."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    generator = kwargs.get("generator")
    before = torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    own = None if generator is None else generator.get_state()
    yield
    torch.set_rng_state(before)
    if on_devices:
        torch.cuda.set_rng_state_all(on_devices)
    if generator is not None:
        generator.set_state(own)


def _tensors(results: Any) -> list[Tensor]:
    return list(tensors_of((results,), {}))


def _typical(tensor: Tensor) -> float:
    """The size of a tensor's numbers, masks left out."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    sizes = tensor.abs().double()
    return float(torch.where(sizes < _MASK, sizes, 0.0).mean())


def _greatest(tensor: Tensor) -> float:
    sizes = tensor.abs().double()
    return float(torch.where(sizes < _MASK, sizes, 0.0).max())


def _checksum(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.layout != torch.strided:
        return 0.0
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(values.double().nan_to_num(1.0, 2.0, 3.0).clamp(-_MASK, _MASK).sum())


def _scalars(call: Call) -> str:
    """The arguments that are no tensors."""
    shown = []
    for name, value in call.arguments.items():
        if not list(_inputs_in(value)):
            shown.append(f"{name}={value}")
    return ", ".join(shown) or "none"


def _inputs_in(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _inputs_in(each)
    elif hasattr(value, "placement"):
        yield value
