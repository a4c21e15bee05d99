"""Tensors that a script moves to CUDA or makes there, on the CPU; which devices stand for it.

A few questions have one right answer for the script and another for PyTorch: in a script ``tensor.is_cuda``
decides whether a tensor has arrived, in PyTorch which kernel may work on it.
"""

import contextlib
import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.cpu_mode import _private

_CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether something names a CUDA device: a text, a device, or a number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device; anything else as it is."""
    return _CPU if is_cuda(device) else device


def index_of(device: Any, *, current: int) -> int:
    if isinstance(device, int):
        return device if device >= 0 else current
    if isinstance(device, str):
        device = torch.device(device)
    index = getattr(device, "index", None)
    return current if index is None else int(index)


def named(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call of `torch.device` makes."""
    first = args[0] if args else kwargs.get("device")
    if len(args) + len(kwargs) == 1 and isinstance(first, int) and not isinstance(first, bool):
        return plain("cuda", max(first, 0))
    return _CPU if first == "cpu" and len(args) + len(kwargs) == 1 else plain(*args, **kwargs)


def _is_the_host(device: Any) -> bool:
    """Whether a script says the CPU; a tensor's own ``device``, which equals it, stands for a GPU."""
    return device is _CPU or (isinstance(device, str) and device.startswith("cpu"))


def put(owner: Any, name: str, function: Any) -> None:
    """Puts a function or class in a public place."""
    original = getattr(owner, name, None)
    if isinstance(function, types.FunctionType):
        in_class = inspect.isclass(owner)
        function.__module__ = owner.__module__ if in_class else owner.__name__
        function.__name__ = name
        function.__qualname__ = f"{owner.__qualname__}.{name}" if in_class else name
        if original is not None and not inspect.isclass(original):
            function.__doc__ = original.__doc__
    setattr(owner, name, function)


def put_all(found: Mapping[str, Any], *owners: Any) -> None:
    """Puts functions and classes in one or several modules, the last of which they name as their own."""
    for name, function in found.items():
        own = _twin(function) if isinstance(function, types.FunctionType) else function
        for owner in owners:
            put(owner, name, own)


def put_translated(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of a function in its place; nothing happens where this PyTorch lacks it."""
    original = getattr(owner, name, None)
    if original is not None:
        replacement = make(original)
        _private.let_torchscript_take(replacement, original)
        put(owner, name, replacement)


def with_argument(
    function: Callable[..., Any],
    name: str,
    change: Callable[[Any], Any],
    *,
    position: int | None = None,
    default: Any = inspect.Parameter.empty,
    without: Sequence[str] = (),
) -> Callable[..., Any]:
    """A function with one argument changed, wherever a call has it.

    Args:
        position: where it may stand, for functions whose signature does not tell; by default by name alone.
        default: what is changed where a call leaves the argument out; by default nothing.
        without: further arguments, by name, that it does not get.

    >>> power = with_argument(pow, "exp", lambda number: number + 1)
    >>> power(2, 3), power(2, exp=3)
    (16, 16)
    """
    if position is None:
        with contextlib.suppress(ValueError):  # PyTorch's core has no signatures
            position = list(inspect.signature(function).parameters).index(name)
    place = sys.maxsize if position is None else position
    is_filled_in = default is not inspect.Parameter.empty

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], change(args[place]), *args[place + 1 :])
        elif name in kwargs or is_filled_in:
            kwargs[name] = change(kwargs.get(name, default))
        if kwargs:
            for each in without:
                kwargs.pop(each, None)
        return function(*args, **kwargs)

    return changed


def _twin(f: types.FunctionType) -> types.FunctionType:
    twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    twin.__kwdefaults__ = f.__kwdefaults__
    return twin


_OWN_PACKAGES = ("shardwright", "smdistributed", "torch")


@functools.cache
def _installed_at() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found.add(str(Path(torch.__file__).parent.parent))
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(f"{path}/" for path in sorted(found))


@functools.cache
def _is_installed(path: str, module: str) -> bool:
    return path.startswith(("<", *_installed_at())) or module.partition(".")[0] in _OWN_PACKAGES


def script_asks() -> bool:
    """Whether code of the script has called the function that asks."""
    frame = sys._getframe(2)
    return not _is_installed(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


# Everything in the namespace of torch that takes a device; a test compares it with PyTorch's own list.
FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_quantized empty_strided eye frombuffer full full_like hamming_window hann_window kaiser_window "
    "linspace logspace normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
    "range scalar_tensor "
    "sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()


def put_factories_in_force() -> None:
    _private.device_constructors()  # before some are replaced
    _private.intercept_calls(torch.device, named)
    _private.intercept_calls(torch.Generator, _generator_on_cpu)
    for owner, names in (
        (torch, FACTORIES),
        (torch.fft, ("fftfreq", "rfftfreq")),
        (torch.nested, ("nested_tensor", "as_nested_tensor")),
    ):
        for name in names:
            put_translated(owner, name, made_on_cpu)
    put_translated(
        torch, "load", lambda load: with_argument(load, "map_location", _place_on_cpu, default=None)
    )
    # None is the CPU, and unlike a device it costs nothing at each function.
    put_translated(torch, "set_default_device", lambda to: with_argument(to, "device", none_if_cuda))
    put_translated(torch, "set_default_tensor_type", lambda to: with_argument(to, "t", _type_on_cpu))
    _private.translate_device_contexts(on_cpu)


made_on_cpu = functools.partial(with_argument, name="device", change=on_cpu, without=("pin_memory",))
"""A function that makes its tensor on the CPU and in ordinary memory, also where it is told otherwise."""

sent_to_cpu = functools.partial(with_argument, name="device", change=on_cpu, position=1)
"""The method ``to``, whose device comes first, or is named."""


def _generator_on_cpu(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return with_argument(plain, "device", on_cpu, position=0)(*args, **kwargs)


def _place_on_cpu(map_location: Any) -> Any:
    if isinstance(map_location, dict):
        return {source: str(on_cpu(target)) for source, target in map_location.items()}
    # Also without: a file may come from a machine with GPUs.
    return "cpu" if map_location is None or is_cuda(map_location) else map_location


def none_if_cuda(device: Any) -> Any:
    """The device; None where it is one of CUDA."""
    return None if is_cuda(device) else device


def _type_on_cpu(kind: Any) -> Any:
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


_MAKERS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _is_made_here(tensor: Tensor) -> bool:
    """Whether a tensor is trained that is of no model: a script has made it on the host, where it stays."""
    return tensor.is_leaf and tensor.requires_grad and type(tensor) is Tensor and torch.is_grad_enabled()


def put_in_force() -> None:
    cls: Any = Tensor
    plain_to = cls.to
    sent_to = sent_to_cpu(plain_to)

    @functools.wraps(plain_to)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            _is_the_host(args[0] if args else kwargs.get("device"))
            and script_asks()
            and not _is_made_here(self)
        ):
            return plain_to(self, *args[:3], **{**kwargs, "copy": True})
        return sent_to(self, *args, **kwargs)

    # From a GPU it is a copy, by which scripts keep weights that are trained on. In the other direction it is
    # none: whether a tensor is there already is unknown here, where a GPU's would be the tensor itself, with
    # what is written into it, and a leaf that an optimizer takes.
    @functools.wraps(cls.cpu)
    def cpu(self: Tensor, memory_format: Any = torch.preserve_format) -> Any:
        return plain_to(
            self, device="cpu", memory_format=memory_format, copy=script_asks() and not _is_made_here(self)
        )

    put(cls, "to", to)
    put(cls, "cpu", cpu)

    @functools.wraps(cls.cuda)
    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        return plain_to(self, device="cpu", memory_format=memory_format)

    put(cls, "cuda", cuda)
    for name in _MAKERS:
        put_translated(cls, name, made_on_cpu)
    # Pinned memory is what a GPU reads from: without one there is nothing that would be faster with it.
    put_translated(cls, "pin_memory", _as_it_is)
    put_translated(cls, "record_stream", _without_effect)
    cls.is_cuda = property(_seen_on_cuda(cls.is_cuda), doc=cls.is_cuda.__doc__)
    put_translated(cls, "type", _type_on_cuda)
    untyped: Any = torch.UntypedStorage
    untyped.__new__ = staticmethod(with_argument(untyped.__new__, "device", on_cpu))
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        put_translated(storage, "cuda", _as_it_is)
        put_translated(storage, "to", sent_to_cpu)
        put_translated(storage, "pin_memory", _as_it_is)


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a method that would move an object to where there is nothing."""
    return functools.wraps(method)(lambda self, *args, **kwargs: self)


def _without_effect(method: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(method)(lambda *args, **kwargs: None)


def _seen_on_cuda(is_cuda: Any) -> Callable[[Tensor], bool]:
    """``is_cuda``: true of what is on the CPU where the script asks, for there all of it stands for a GPU."""

    def seen_on_cuda(self: Tensor) -> bool:
        if script_asks():
            return self.device.type == "cpu"
        return bool(is_cuda.__get__(self))

    return seen_on_cuda


def _type_on_cuda(kind_of: Callable[..., Any]) -> Callable[..., Any]:
    """``type()`` says to the script that a tensor is on CUDA; ``type("torch.cuda.HalfTensor")`` works."""

    @functools.wraps(kind_of)
    def type_on_cuda(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = kind_of(self, _type_on_cpu(dtype), *args, **kwargs) if dtype is not None else kind_of(self)
        if dtype is None and self.device.type == "cpu" and script_asks():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return type_on_cuda
