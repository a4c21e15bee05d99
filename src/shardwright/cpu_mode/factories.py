"""Factories and loaders of tensors and generators, redirected to the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.devices import is_cuda, named, on_cpu
from shardwright.cpu_mode.replacement import put_translated

__all__ = ["FACTORIES", "put_in_force"]

# Everything in the namespace of torch that takes a device; a test compares it with PyTorch's own list.
FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_quantized empty_strided eye frombuffer full full_like hamming_window hann_window kaiser_window "
    "linspace logspace normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
    "range scalar_tensor "
    "sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()


def put_in_force() -> None:
    """Replaces the functions."""
    _private.remember_device_constructors()
    _private.intercept_calls(torch.device, named)
    _private.intercept_calls(torch.Generator, _generator_on_cpu)
    for owner, names in (
        (torch, FACTORIES),
        (torch.fft, ("fftfreq", "rfftfreq")),
        (torch.nested, ("nested_tensor", "as_nested_tensor")),
    ):
        for name in names:
            put_translated(owner, name, made_on_cpu)
    put_translated(torch, "load", _loaded_on_cpu)
    put_translated(torch, "set_default_device", _default_on_cpu)
    put_translated(torch, "set_default_tensor_type", _default_type_on_cpu)
    _private.translate_device_contexts(on_cpu)


def made_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes its tensor on the CPU and in ordinary memory, also where it is told otherwise."""

    @functools.wraps(make)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return translated


def _generator_on_cpu(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (on_cpu(args[0]), *args[1:])
    elif "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    return plain(*args, **kwargs)


def _loaded_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def translated(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or is_cuda(map_location):
            map_location = "cpu"  # also without: a file may come from a machine with GPUs
        elif isinstance(map_location, dict):
            map_location = {source: str(on_cpu(target)) for source, target in map_location.items()}
        return load(f, map_location, *args, **kwargs)

    return translated


def _default_on_cpu(set_default: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_default)
    def translated(device: Any) -> None:
        # None is the CPU, and unlike a device it costs nothing at each function.
        set_default(None if is_cuda(device) else device)

    return translated


def _default_type_on_cpu(set_default: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_default)
    def translated(kind: Any) -> None:
        set_default(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)

    return translated
