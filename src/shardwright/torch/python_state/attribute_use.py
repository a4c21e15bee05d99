"""Python attributes of modules that a step function changes: who writes and reads them, in a trace.

Stages of one rank take turns with the microbatches, so what one microbatch writes to an attribute is not what
it finds there on its next stage, unless somebody puts it back (`OwnAttributes`). A microbatch that writes
first has no need of others. One that reads first finds what the microbatch before left, which must have
written it by then::

    F(0, 0) reads a, F(0, 1) reads a, F(2, 0) writes a, F(2, 1) writes a      refused: 1 does not see 0's

One that is put back by the end (a flag that switches adapters off for a while) each microbatch finds as the
first one did.

The position arithmetic of Funnel (``seq_len``), and the marks that wav2vec 2.0 and its kin set at their first
forward, are such attributes; ``config.problem_type`` of 19 classifiers is in an object.

Entries of lists and dictionaries that stay are such slots, too. That one is read is not seen there. A tensor
counts as read if an operation gets it; a number that changes, and a list that gets longer, always::

    self.heads[i] = x                       no read
    x = x + self.state[0]                   a read, if another tensor is there at the end
    self.notes["depth"] += 1                a read
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.torch.interception.glue import active_handler
from shardwright.torch.python_state.snapshot import DICTIONARIES, ClassWatch, SlotContent, namespace_of
from shardwright.torch.pytorch.modules import OF_EVERY_MODULE, user_line
from shardwright.torch.pytorch.tree import ABSENT, PLAIN, Slot, leaves, same_entries

# Parameters, buffers, modules, hooks. Flags that a forward sets are of interest, whoever has declared them.
_OWN = OF_EVERY_MODULE - {"training"}
_NUMBERS = PLAIN - {type(None)}


@dataclass(frozen=True, slots=True)
class Access:
    """An attribute is read or written.

    Attributes:
        before: number of steps that have run; a quarter more behind ``backward``, half of one more inside
            the unit that runs.
        writes: it is written, or what is in it has changed since the access before.
    """

    before: float
    writes: bool
    line: str


@dataclass(frozen=True, slots=True)
class AttributeUse:
    """A changed attribute that code between units reads or writes.

    Attributes:
        module: whose attribute it is; also an object or a dictionary that a module holds.
        carries_tensor: it holds a tensor of the graph when the microbatch ends.
        read_late: it is used behind ``backward``.
        in_place: it holds tensors whose values change.
        put_back: in the end it is what it was at the start.
    """

    module: Any
    key: Any
    name: str
    accesses: tuple[Access, ...]
    carries_tensor: bool
    read_late: bool
    in_place: bool
    put_back: bool = False

    @property
    def first_read(self) -> Access | None:
        """The access that finds what another microbatch left; None if the microbatch writes first."""
        return None if self.accesses[0].writes else self.accesses[0]

    @property
    def last_write(self) -> Access:
        return next((a for a in reversed(self.accesses) if a.writes), self.accesses[-1])


class AttributeUses:
    """Sees how some attributes are used."""

    def __init__(
        self, places: Sequence[Slot], position: Callable[[], float], *, rehearses: Callable[[], bool]
    ):
        self._position = position
        self._rehearses = rehearses
        self._slots = {(id(holder), key): _Seen(holder, key) for holder, key in places}
        self._written: dict[tuple[int, str], Slot] = {}
        self._tensors: dict[int, list[tuple[_Seen, Any]]] = {}
        for seen in self._slots.values():
            entries = seen.initial.inside or ({} if seen.tells else {None: seen.initial.value})
            for key, item in entries.items():
                if isinstance(item, Tensor):
                    self._tensors.setdefault(id(item), []).append((seen, key))

    def look(self, *, inside: bool = False) -> None:
        """Looks what has changed since the last time; before every step."""
        for seen in self._slots.values():
            seen.look(self._position(), inside=inside)

    def used(self, items: Iterable[Any], *, inside: bool = False) -> None:
        for item in items if self._tensors else ():
            for seen, key in self._tensors.get(id(item), ()):
                seen.from_glue = seen.from_glue or not inside
                seen.used.setdefault(key, Access(self._position() + 0.5 * inside, False, user_line()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what happens inside; which attributes are written it sees of all modules."""
        watch = ClassWatch(lambda item, key: self._note(item, key, writes=False), self._write)
        try:
            watch.watch(nn.Module, reads=bool(self._slots))
            for seen in self._slots.values():
                if not seen.tells and type(seen.holder) not in DICTIONARIES:
                    seen.tells = watch.watch(type(seen.holder))
            yield
        finally:
            watch.forget()

    def _write(self, item: Any, key: str, write: Callable[[], None]) -> None:
        self._note(item, key, writes=True)
        is_module = isinstance(item, nn.Module) and key not in _OWN
        before = vars(item).get(key, ABSENT) if is_module else None
        write()
        if is_module and vars(item).get(key, ABSENT) is not before:
            self._written[id(item), key] = item, key

    def written(self, model: nn.Module) -> list[Slot]:
        """The attributes of a model's modules that were given another value, put back or not."""
        modules = {id(module) for module in model.modules()} if self._written else set()
        return [place for place in self._written.values() if id(place[0]) in modules]

    def _note(self, holder: Any, key: str, *, writes: bool) -> None:
        seen = self._slots.get((id(holder), key))
        if seen is None or self._rehearses():
            return
        self.look()
        inside = active_handler() is None
        seen.from_glue = seen.from_glue or not inside
        seen.told = seen.told or writes
        is_lookup = not writes and seen.now.inside is not None
        seen.accesses.append((Access(self._position() + 0.5 * inside, writes, user_line()), is_lookup))

    def uses(self, model: nn.Module, is_value: Callable[[Any], bool]) -> tuple[AttributeUse, ...]:
        """The uses of attributes by code between units; before these are put back."""
        self.look()
        names = {id(module): name for name, module in model.named_modules()}
        found = []
        for seen in self._slots.values():
            accesses = seen.in_order()
            # A unit may leave something there for another, which is on a later stage of its rank.
            handed_on = len({access.before for access in accesses}) > 1 and accesses[0].writes
            if not accesses or not (seen.from_glue or handed_on):
                continue
            is_module = isinstance(seen.holder, nn.Module)
            where = names.get(id(seen.holder)) or ("the model" if is_module else "what the model holds")
            found.append(
                AttributeUse(
                    seen.holder,
                    seen.key,
                    f"{seen.key} of {where} ({type(seen.holder).__name__})",
                    accesses,
                    carries_tensor=any(is_value(item) for item in leaves(seen.now.value)),
                    read_late=any(access.before % 1 in (0.25, 0.75) for access in accesses),
                    in_place=seen.in_place,
                    put_back=not seen.in_place and seen.now.has_same(seen.initial),
                )
            )
        return tuple(found)


class _Seen:
    """The observed uses of one slot.

    Attributes:
        tells: its holder tells when the slot is read or written.
        accesses: in order, each with whether it only looks a container up: what for is not seen.
        old_reads: of entries as another microbatch may have left them.
        used: entry of a container -> the first use of a tensor that was there at the start.
        told: a write was noted and not looked at yet.
    """

    def __init__(self, holder: Any, key: Any):
        self.holder, self.key = holder, key
        self.tells = isinstance(holder, nn.Module)
        self.initial = self.now = SlotContent.of(holder, key)
        self.accesses: list[tuple[Access, bool]] = []
        self.old_reads: list[Access] = []
        self.used: dict[Any, Access] = {}
        self.from_glue = self.in_place = self.told = False

    @property
    def line(self) -> str:
        """Where code has come by last."""
        return self.accesses[-1][0].line if self.accesses else user_line()

    def look(self, position: float, *, inside: bool) -> None:
        """Takes note of what has changed since the last look."""
        before, told, self.told = self.now, self.told, False
        if type(before.value) in PLAIN and namespace_of(self.holder).get(self.key) is before.value:
            return
        now = SlotContent.of(self.holder, self.key)
        stays = now.value is before.value
        if stays and same_entries(now.inside, before.inside):
            if now.versions == before.versions:
                return
            self.in_place = True
        self.now = now
        at = position - 0.5 * inside
        if self.tells and not stays:
            if not told:  # by a unit of which a copy was run
                self.accesses.append((Access(at, True, self.line), False))
            return
        if before.value is self.initial.value and _may_have_read(before, now):
            self.old_reads.append(Access(at, False, self.line))
        self.accesses.append((Access(at, True, self.line), False))
        self.from_glue = self.from_glue or not (self.tells or inside)

    def in_order(self) -> tuple[Access, ...]:
        """The accesses; first one that finds what another microbatch left there, if any does."""
        stays = self.now.value is self.initial.value and self.initial.inside is not None
        found = [access for access, is_lookup in self.accesses if not (is_lookup and stays)]
        used = [access for key, access in self.used.items() if self._is_other(key)]
        old = min((*self.old_reads, *used), key=lambda access: access.before, default=None)
        return tuple(found if old is None else (old, *found))

    def _is_other(self, entry: Any) -> bool:
        """Whether there is another tensor at an entry, or one with other values."""
        if self.in_place or self.now.value is not self.initial.value:
            return True
        before, now = self.initial.inside or {}, self.now.inside or {}
        return now.get(entry) is not before.get(entry)


def _may_have_read(before: SlotContent, now: SlotContent) -> bool:
    """Whether a change counts as read before: that of a number, of the length of a list, or in place."""
    if now.value is not before.value:
        return type(before.value) in _NUMBERS
    was, is_now = before.inside or {}, now.inside or {}
    changed = [key for key in {**was, **is_now} if was.get(key, ABSENT) is not is_now.get(key, ABSENT)]
    is_resized = not isinstance(now.value, dict) and was.keys() != is_now.keys()
    return not changed or is_resized or any(type(was.get(key)) in _NUMBERS for key in changed)
