"""Tensors and arrays between ranks: as raw memory, and in `codec` with dtype and shape.

A tensor on an accelerator goes to the receiving rank's accelerator. Tensors that are more than their numbers
(sparse or quantised ones, subclasses, arrays of objects) are refused.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.comm.codec import DecodeError, decode, encode, register
from shardwright.errors import UsageError

__all__ = ["DecodeError", "bytes_of", "decode", "encode", "flat"]


def bytes_of(tensor: Tensor) -> Tensor:
    """The entries of a tensor, in order, as bytes.

    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single entry counts as contiguous whatever its strides are.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def flat(tensor: Tensor, kind: str) -> Tensor:
    """The elements of a tensor as they lie in memory, which must be the same way on all ranks."""
    if not tensor.numel() or (tensor.is_contiguous() and not tensor.is_complex()):
        return tensor.detach().view(-1)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    expected = 1
    for stride, size in sorted(zip(plain.stride(), plain.shape, strict=True)):
        if size != 1 and stride != expected:
            raise UsageError(
                f"{kind} takes tensors without holes, but this one of shape {tuple(tensor.shape)} has the "
                f"strides {tensor.stride()}. Pass a contiguous copy."
            )
        expected *= size
    return plain.detach().as_strided((plain.numel(),), (1,))


_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and not str(each).removeprefix("torch.").startswith(("q", "bits"))
}


def _plain_tensor(tensor: Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot travel between ranks")
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b""
    on_cpu = tensor.device.type == "cpu"
    return [_name(tensor.dtype), list(tensor.shape), tensor.requires_grad and tensor.is_leaf, on_cpu, data]


def _tensor(plain: Any) -> Tensor:
    name, shape, requires_grad, on_cpu, data = plain
    dtype = _DTYPES[name]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise DecodeError(f"{shape!r:.80} is no shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise DecodeError(f"{len(data)} bytes are no {name} tensor of shape {shape!r:.80}")
    # A copy, which can be written to.
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    found = found.reshape(shape)
    if not on_cpu and torch.cuda.is_available():
        found = found.to(torch.device("cuda", torch.cuda.current_device()))
    return found.requires_grad_() if requires_grad else found


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"tensors of {dtype} cannot travel between ranks")
    return name


def _plain_array(array: Any) -> list[Any]:
    if array.dtype.hasobject:
        raise TypeError("an array of objects cannot travel between ranks as data")
    described = array.dtype.str if array.dtype.names is None else array.dtype.descr
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return [described, list(array.shape), order, array.tobytes(order)]


def _array(plain: Any) -> Any:
    described, shape, order, data = plain
    dtype = np.dtype(described)
    if dtype.hasobject:
        raise DecodeError("an array of objects stands where data must")
    if dtype.itemsize * math.prod(shape) != len(data):
        raise DecodeError(f"{len(data)} bytes are no array of {dtype} of shape {shape!r:.80}")
    return np.ndarray(shape, dtype, bytearray(data), order=order)


register(Tensor, "tensor", _plain_tensor, _tensor)
register(
    nn.Parameter, "parameter", lambda p: [p.detach(), p.requires_grad], lambda plain: nn.Parameter(*plain)
)
register(torch.dtype, "dtype", _name, _DTYPES.__getitem__)
register(torch.device, "device", str, torch.device)
register(torch.Size, "size", list, torch.Size)
register(np.ndarray, "array", _plain_array, _array)
for _kind in {kind for kind in np.sctypeDict.values() if kind is not np.object_ and kind is not np.void}:
    register(
        _kind,
        f"numpy.{_kind.__name__}",
        lambda number: _plain_array(np.asarray(number)),
        lambda plain: _array(plain)[()],
    )
