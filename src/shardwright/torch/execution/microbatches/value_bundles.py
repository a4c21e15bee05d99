"""Carries tensors that a step function reads from the rank that made them to the others, by a board.

Small tensors are posted in bundles, whether or not a rank asks for them. A large tensor is posted alone, each
time that its rank uses it::

    0 of 1, 0      first bundle of rank 1 in microbatch 0: its loss
    0 of 1, 1      second one: nothing more comes before its backward
    0/17.0/0       value 17 of microbatch 0, put up for the first time: all logits
    0/17.1/0       the same one, after a module has changed it in place
"""

import json
import weakref
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from torch import Tensor

from shardwright.comm.joining.run_secret import not_from_a_stranger
from shardwright.comm.joining.store import ValueBoard
from shardwright.comm.tensor_codec import bytes_of
from shardwright.errors import TraceMismatchError
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.tensor_parallel.divided_tensor import whole

_SMALL_BYTES = 2**16

# A value, and how often the program has changed it in place.
_Name: TypeAlias = tuple[int, int]


class PostedValues:
    """The values that one microbatch makes on this rank and posts for the others, and those that it takes.

    Attributes:
        changes: how often the program has changed a value so far.
    """

    def __init__(self, index: int, program: Program, board: ValueBoard):
        self.changes: Counter[int] = Counter()
        self._is_behind_backward = False  # nothing that was made before will be put up from now on
        self._index = index
        self._program = program
        self._board = board
        self._waiting: dict[int, Tensor] = {}  # for the next bundle
        self._small: dict[int, weakref.ref[Tensor]] = {}  # what bundles have, or will have
        self._large: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}  # of what was put up in bundles
        self._num_bundles = 0
        self._has_any = False
        self._turns: Counter[_Name] = Counter()  # how often this rank has used a large one
        self._num_put: Counter[_Name] = Counter()  # how often that was put up
        self._taken: dict[int, list[_Bundle]] = {}  # bundles of each rank, as far as they came
        self._num_taken: Counter[_Name] = Counter()  # how often a value that was put up by itself was taken

    def clear(self) -> None:
        self._waiting.clear()
        self._taken.clear()

    def note(self, value: int, tensor: Tensor) -> None:
        """Records a tensor that code of the step function gets to see."""
        self._has_any = True
        if self._program.trace.graph.values[value].spec.num_bytes <= _SMALL_BYTES:
            self._waiting[value] = tensor
            self._small[value] = weakref.ref(tensor)
        else:
            self._large[value] = weakref.ref(tensor)

    def before_change(self, values: Collection[int]) -> None:
        """Posts waiting values before the program changes them in place, and once more afterwards."""
        if not self._waiting.keys().isdisjoint(values):
            self.put_up_small()
        for value in self._small.keys() & values:
            tensor = self._small[value]()
            if tensor is not None:
                self._waiting[value] = tensor
                self._versions.pop(value, None)
        self.changes.update(values)

    def put_up_small(self) -> None:
        """Posts small values: others may read them now, and units may change them later."""
        if self._waiting:
            self._put_bundle(is_last=False)

    def put_up_large(self) -> None:
        """Posts large values, before any rank is known to use them."""
        for value, reference in self._large.items():
            tensor = reference()
            if tensor is not None:
                self._put_up_large(value, tensor)

    def put_up(self, value: int, tensor: Tensor) -> None:
        """Posts a value that the step function uses."""
        self.put_up_small()
        if self._versions.get(value, tensor._version) != tensor._version:
            raise TraceMismatchError(
                f"{user_line()}: a tensor is read that a module has changed in place since values of this "
                "microbatch were read before, which it did not when it was traced: other ranks would read "
                "what it was then. Read a clone() of it, or let the module not work in place."
            )
        if value not in self._small:
            self._put_up_large(value, tensor)
            self._turns[value, self.changes[value]] += 1

    def pass_backward(self) -> None:
        """Posts small values before the backward, or at an end without one: nobody waits for more."""
        if not self._is_behind_backward:
            self._is_behind_backward = True
            if not self._program.trace.ends:
                self._board.mark(_passed(self._index))
            elif self._has_any:
                self._put_bundle(is_last=True)

    def _put_up_large(self, value: int, tensor: Tensor) -> None:
        """Posts a large value once for each use by this rank, and for the next one."""
        name = value, self.changes[value]
        turn = self._turns[name]
        if self._num_put[name] == turn:
            self._board.put(_name_of_value(self._index, name, turn), _bytes(tensor))
            self._num_put[name] = turn + 1

    def _put_bundle(self, *, is_last: bool) -> None:
        waiting, self._waiting = self._waiting, {}
        parts = {(value, self.changes[value]): _bytes(tensor) for value, tensor in waiting.items()}
        name = _name_of_bundle(self._index, self._program.rank, self._num_bundles)
        self._board.put(name, _Bundle(parts, is_last).packed())
        self._versions.update((value, tensor._version) for value, tensor in waiting.items())
        self._num_bundles += 1

    def take(self, value: int) -> bytes:
        """A value that another rank posts."""
        packed = self._take(value, self._program.stage_ranks[self._program.home_of[value]])
        spec = self._program.trace.graph.values[value].spec
        if len(packed) != spec.num_bytes:
            raise TraceMismatchError(
                f"{user_line()}: this tensor has another shape in microbatch {self._index} than in the trace "
                f"({spec.shape}). Shapes must follow from those of the batch alone."
            )
        return packed

    def _take(self, value: int, source: int) -> bytes:
        is_behind_backward = self._is_behind_backward
        bundles = self._taken.setdefault(source, [])
        name = value, self.changes[value]
        for bundle in bundles:
            if name in bundle.parts:
                return bundle.parts[name]
        by_itself = _name_of_value(self._index, name, self._num_taken[name])
        while True:
            # What is put up before the backward is there by now, if the other rank has come to that.
            late = any(bundle.is_last for bundle in bundles) and not is_behind_backward
            names = [by_itself, _name_of_bundle(self._index, source, len(bundles))][: 1 if late else 2]
            absent = _not_put_up(source)
            mark = "" if is_behind_backward else _passed(self._index)
            found, packed = self._board.get(names, source, absent, is_late=late, mark=mark)
            if found == by_itself:
                self._num_taken[name] += 1
                return packed
            with not_from_a_stranger("values of a step"):
                bundles.append(_Bundle.of(packed))
            if name in bundles[-1].parts:
                return bundles[-1].parts[name]


class _Bundle(NamedTuple):
    """Small tensors that a rank puts up together.

    Attributes:
        parts: value, how often the program had changed it -> its bytes.
        is_last: those that the rank makes before its backward were put up.
    """

    parts: dict[_Name, bytes]
    is_last: bool

    def packed(self) -> bytes:
        """A line of JSON, and the bytes."""
        header = [self.is_last, [(*name, len(part)) for name, part in self.parts.items()]]
        return json.dumps(header).encode() + b"\n" + b"".join(self.parts.values())

    @classmethod
    def of(cls, packed: bytes) -> "_Bundle":
        header, _, rest = packed.partition(b"\n")
        is_last, sizes = json.loads(header)
        parts, at = {}, 0
        for value, changes, size in sizes:
            parts[value, changes] = rest[at : at + size]
            at += size
        return cls(parts, is_last)


def _name_of_bundle(index: int, rank: int, number: int) -> str:
    return f"{index} of {rank}, {number}"


def _passed(index: int) -> str:
    return f"passed {index}"


def _name_of_value(index: int, name: _Name, turn: int) -> str:
    value, changes = name
    return f"{index}/{value}.{changes}/{turn}"


def _not_put_up(source: int) -> TraceMismatchError:
    return TraceMismatchError(
        f"{user_line()}: this rank uses a tensor here that pipeline rank {source} has, whose step function "
        "has passed its backward, or ended, without using it. Use large tensors on all ranks, or on none; "
        "one rank alone may read small ones where the step function says so: loss.item()."
    )


def _bytes(tensor: Tensor) -> bytes:
    with plain_torch():
        return bytes_of(whole(tensor)).cpu().numpy().tobytes()
