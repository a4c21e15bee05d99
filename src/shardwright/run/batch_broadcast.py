"""Broadcasts the tensors of a batch from the first rank of a replica, with what it says of them.

One broadcast while batches look alike; three where the header changes::

    [ 0 | tensors ]                           described as before
    [ n | ignored ]  [ n bytes ]  [ tensors ] described anew
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import seal_of_session
from shardwright.comm.message_names import Purpose
from shardwright.comm.tensor_codec import DecodeError, decode, encode
from shardwright.comm.transport import SmallCollectives
from shardwright.errors import LaunchError

PLACE = "the batch"
"""For which headers are sealed."""

Room = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor, as it is sent."""


class TensorBroadcast:
    """Gives all ranks of a replica the tensors of its first rank, whatever the others have.

    Attributes:
        seal: of the run, if it has a secret.
    """

    def __init__(self, replica: SmallCollectives, *, source: int, device: torch.device):
        self.is_source = dist.get_rank() == source
        self.seal = seal_of_session()
        self.device = device
        self._replica = replica
        self._source = source
        self._header = b""
        self._room: Room = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The first rank's tensors; collective over the replica."""
        if not self.is_source:
            return self.receive(self._read)
        room = [(tuple(each.shape), each.dtype) for each in tensors]
        header = None
        if room != self._room:
            header = encode([[list(shape), dtype] for shape, dtype in room])
            header = header if self.seal is None else self.seal.sealed(PLACE, header)
        self.send(tensors, header)
        return tensors

    def send(self, tensors: Sequence[Tensor], header: bytes | None) -> None:
        """Sends them, on the first rank."""
        if header is None or header == self._header:
            self._broadcast([self._number(0), *tensors])
            return
        self._broadcast([self._number(len(header)), *self._empty()])
        self._broadcast([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)])
        self._header, self._room = header, [(tuple(each.shape), each.dtype) for each in tensors]
        self._broadcast(tensors)

    def receive(self, read: Callable[[bytes], Room]) -> list[Tensor]:
        """Takes them, on the other ranks."""
        number, tensors = self._number(0), self._empty()
        self._broadcast([number, *tensors])
        header_bytes = int(number.item())
        if not header_bytes:
            return tensors
        header = torch.empty(header_bytes, dtype=torch.uint8, device=self.device)
        self._broadcast([header])
        self._room = read(header.cpu().numpy().tobytes())
        tensors = self._empty()
        self._broadcast(tensors)
        return tensors

    def _read(self, data: bytes) -> Room:
        with header_read():
            plain = decode(data if self.seal is None else self.seal.opened(PLACE, data))
            return [(tuple(int(size) for size in shape), dtype) for shape, dtype in plain]

    def _empty(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._room]

    def _number(self, number: int) -> Tensor:
        return torch.tensor(number, dtype=torch.int64, device=self.device)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._replica.broadcast(tensors, self._source, Purpose.BATCH)


@contextmanager
def header_read() -> Iterator[None]:
    """Around the reading of a header: what is none has come from a stranger."""
    try:
        yield
    except (DecodeError, ValueError, TypeError, LookupError) as error:
        raise LaunchError(
            f"what the first rank of the replica says of its batch cannot be read: {error}. A stranger "
            "writes in its place."
        ) from error
