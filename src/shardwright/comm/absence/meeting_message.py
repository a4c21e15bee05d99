"""The messages by which ranks of one host announce themselves at a joint call."""

import struct

import torch
from torch import Tensor

from shardwright.comm.absence.meeting_place import MeetingPlace
from shardwright.comm.identity.rank_set import digest

__all__ = ["call_in", "is_of_before", "message_of", "no_message", "other_call"]

_LONGEST_NAME = 64
# How all of them call it, and how this one does; who makes it, and how many such calls these have made.
_MESSAGE = struct.Struct(f"={_LONGEST_NAME}s{_LONGEST_NAME}s16sQ")


def message_of(place: MeetingPlace) -> Tensor:
    """Says to which call this rank has come."""
    return torch.frombuffer(bytearray(_packed(place)), dtype=torch.uint8)


def no_message() -> Tensor:
    """Room for what another rank says."""
    return torch.zeros(_MESSAGE.size, dtype=torch.uint8)


def call_in(message: Tensor) -> str:
    """The call to which another rank has come, as its script writes it."""
    where = _MESSAGE.unpack(_bytes(message))[1]
    return str(where.rstrip(b"\0").decode(errors="replace"))


def is_of_before(message: Tensor, place: MeetingPlace) -> bool:
    """Whether another rank has come to a call before this one, of the same ranks."""
    _, _, ranks, meeting = _MESSAGE.unpack(_bytes(message))
    return bool(ranks == digest(place.ranks).encode() and meeting < place.meeting)


def other_call(message: Tensor, place: MeetingPlace) -> str | None:
    """The call to which another rank has come, where it is another one."""
    name, _, *call = _MESSAGE.unpack(_bytes(message))
    own_name, _, *own_call = _MESSAGE.unpack(_packed(place))
    return None if (name, call) == (own_name, own_call) else call_in(message)


def _packed(place: MeetingPlace) -> bytes:
    name, where = (part.encode()[:_LONGEST_NAME] for part in (place.name or place.where, place.where))
    return _MESSAGE.pack(name, where, digest(place.ranks).encode(), place.meeting)


def _bytes(message: Tensor) -> bytes:
    return bytes(message.tolist())
