"""Sends objects that only pickle can carry; the one place that unpickles what a rank sent.

A pickle is a program. So it is loaded only with a valid code of the run's secret, which proves that a rank of
this run made it. A run without a secret has no such code, and does not send the user's own objects.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from shardwright.comm.trust.seal import Seal
from shardwright.errors import UsageError

__all__ = ["packed", "packed_with_tensors", "unpacked", "unpacked_with_tensors"]

_HINT = "for example export SHARDWRIGHT_SECRET=$(openssl rand -hex 32) before srun, mpirun or torchrun"


def packed(
    thing: Any, seal: Seal | None, place: str, *, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """An object as bytes."""
    return _sealed(dumps(thing) if seal is not None else b"", thing, seal, place)


def unpacked(data: bytes, seal: Seal | None, place: str) -> Any:
    """The object of `packed`."""
    return pickle.loads(_opened(data, seal, place))


def packed_with_tensors(thing: Any, seal: Seal | None, place: str) -> bytes:
    """As `packed`, by `torch.save`: tensors that share memory do so afterwards."""
    import torch

    buffer = io.BytesIO()
    if seal is not None:
        torch.save(thing, buffer)
    return _sealed(buffer.getvalue(), thing, seal, place)


def unpacked_with_tensors(
    data: bytes, seal: Seal | None, place: str, *, map_location: Callable[[Any, str], Any] | None = None
) -> Any:
    """The object of `packed_with_tensors`."""
    import torch

    return torch.load(io.BytesIO(_opened(data, seal, place)), map_location=map_location, weights_only=False)


def _sealed(data: bytes, thing: Any, seal: Seal | None, place: str) -> bytes:
    if seal is None:
        kind = type(thing)
        raise UsageError(
            f"a {kind.__module__}.{kind.__qualname__} can travel between ranks by pickle alone, and a pickle "
            "of another rank is loaded only where the ranks share a secret, which they do not here. Set one, "
            f"the same on all hosts ({_HINT}), or pass tensors, numbers, text, lists and dictionaries."
        )
    return seal.sealed(_name(place), data)


def _opened(data: bytes, seal: Seal | None, place: str) -> bytes:
    if seal is None:
        raise UsageError(
            "another rank sends a pickle, and this rank has no secret by which to know that a rank of the "
            f"run has made it. Set one, the same on all hosts ({_HINT})."
        )
    return seal.opened(_name(place), data)


def _name(place: str) -> str:
    return f"pickle: {place}"
