"""Exchanges facts between ranks as data (see `codec`). No rank runs what another sends.

A short fact takes one collective, a longer one two::

    [ length | the first bytes ]    from everybody, always of one size
    [ all bytes ]                   where one of them has more, as many as the longest needs

Ranks of one host exchange the first by their own connections: gloo's threads wake up one after the other.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.run_secret import Seal, packed, unpacked
from shardwright.comm.tensor_codec import DecodeError, decode, encode
from shardwright.errors import LaunchError

_LENGTH = struct.Struct("<Q")
_SHORT_BYTES = 1024
_MOST_BYTES = 2**36  # no fact is that long: a stranger has written the length


def facts_of_all(
    fact: Any,
    *,
    seal: Seal | None,
    group: dist.ProcessGroup | None = None,
    objects: bool = False,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> list[Any]:
    """Tells all ranks of a group a fact; collective over them.

    Args:
        gather: a faster way for short messages.
    """
    own = _written(fact, seal, dist.get_rank(), objects=objects)
    num_ranks = dist.get_world_size(group)

    def exchanged(message: Tensor) -> list[Tensor]:
        if gather is not None and len(message) == _SHORT_BYTES:
            return list(gather(message))
        message = message.to(_device(group))
        found = [torch.empty_like(message) for _ in range(num_ranks)]
        dist.all_gather(found, message, group=group)
        return found

    told = _exchanged(own, exchanged)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(num_ranks)
    return [_read(data, seal, rank, objects=objects) for rank, data in zip(ranks, told, strict=True)]


def fact_of(source: int, fact: Any, *, seal: Seal | None) -> Any:
    """A fact of one rank, on all of them; collective over all ranks."""
    is_own = dist.get_rank() == source
    own = _written(fact, seal, source, objects=False) if is_own else b""

    def exchanged(message: Tensor) -> list[Tensor]:
        message = message.to(_device(None))
        dist.broadcast(message, source)
        return [message]

    (told,) = _exchanged(own, exchanged)
    return fact if is_own else _read(told, seal, source, objects=False)


def _exchanged(own: bytes, exchange: Callable[[Tensor], list[Tensor]]) -> list[bytes]:
    """Exchanges what everybody has written, by a collective for equally long messages."""
    first = [_bytes_in(each) for each in exchange(_message(_LENGTH.pack(len(own)) + own, _SHORT_BYTES))]
    lengths = [_LENGTH.unpack_from(each)[0] for each in first]
    longest = max(lengths)
    if longest > _MOST_BYTES:
        raise LaunchError(f"a rank tells {longest} bytes at once: a stranger writes in its place.")
    whole = [each[_LENGTH.size :] for each in first]
    if longest > _SHORT_BYTES - _LENGTH.size:
        # Never as long as a short one, which may go another way.
        whole = [_bytes_in(each) for each in exchange(_message(own, longest + _LENGTH.size))]
    return [each[:length] for each, length in zip(whole, lengths, strict=True)]


def _message(data: bytes, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8)


def _bytes_in(message: Tensor) -> bytes:
    return message.cpu().numpy().tobytes()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _place(rank: int) -> str:
    return f"what rank {rank} tells"


def _written(fact: Any, seal: Seal | None, rank: int, *, objects: bool) -> bytes:
    place = _place(rank)
    data = encode(fact, other=(lambda thing: packed(thing, seal, place)) if objects else None)
    return data if seal is None else seal.sealed(place, data)


def _read(data: bytes, seal: Seal | None, rank: int, *, objects: bool) -> Any:
    place = _place(rank)
    if seal is not None:
        data = seal.opened(place, data)
    try:
        return decode(data, other=(lambda piece: unpacked(piece, seal, place)) if objects else None)
    except DecodeError as error:
        raise LaunchError(
            f"{place} cannot be read: {error}. It runs another version of Shardwright, or a stranger writes "
            "in its place."
        ) from error
