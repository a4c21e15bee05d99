"""The programs of a rank, by the microbatches that they hold for."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from shardwright.torch.batch import Arguments
from shardwright.torch.path import Path
from shardwright.torch.program import Program
from shardwright.torch.recording import Trace

log = logging.getLogger(__name__)

__all__ = ["ProgramCache"]

# A path that is never taken twice (a length that Python reads) must not fill the memory.
_PATHS_KEPT = 32


@dataclass(frozen=True, slots=True)
class _Entry:
    program: Program
    path: Path | None

    def holds_for(self, part: Arguments) -> bool:
        return self.path is None or self.path.taken_by(part)


class ProgramCache:
    """Programs of microbatches of equal signature, one for each path that was taken so far.

    A program holds for its path alone, even if another one has the same graph: values that Python read may
    be in it, as the place of a view, the size of a random draw, or a number that a unit passes on.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._warned = False

    def find(self, signature: Hashable, part: Arguments) -> Program | None:
        """The program of a microbatch; None if it must be traced."""
        entries = self._entries.get(signature, [])
        for position, entry in enumerate(entries):
            if entry.holds_for(part):
                entries.insert(0, entries.pop(position))  # the next microbatch is tried on it first
                return entry.program
        return None

    def keep(self, signature: Hashable, trace: Trace, program: Program) -> None:
        """Notes the program of a trace, for all microbatches that take its path."""
        if trace.reads_data and trace.path is None:
            if not self._warned:
                log.warning(
                    "Every microbatch is traced again: Python reads values of the batch in a way that cannot "
                    "be followed (random numbers, NumPy arrays, changes of what a tensor's memory is)."
                )
            self._warned = True
            return
        entries = self._entries.setdefault(signature, [])
        entries.insert(0, _Entry(program, trace.path))
        del entries[_PATHS_KEPT:]
