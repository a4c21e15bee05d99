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
    reads_data: bool
    path: Path | None

    def holds_for(self, part: Arguments) -> bool:
        return not self.reads_data or (self.path is not None and self.path.taken_by(part))


class ProgramCache:
    """Programs of microbatches of equal signature, one for each path that was taken so far."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, list[_Entry]] = {}

    def find(self, signature: Hashable, part: Arguments) -> Program | None:
        """The program of a microbatch; None if it must be traced."""
        entries = self._entries.get(signature, [])
        for position, entry in enumerate(entries):
            if entry.holds_for(part):
                entries.insert(0, entries.pop(position))  # the next microbatch is tried on it first
                return entry.program
        return None

    def find_equal(self, signature: Hashable, trace: Trace) -> Program | None:
        """A program that does what was traced: other values were read, and nothing followed from them."""
        for entry in self._entries.get(signature, []):
            functions = [instruction.func for instruction in entry.program.instructions]
            same_graph = entry.program.fingerprint == trace.graph.fingerprint
            if same_graph and functions == [step.func for step in trace.steps]:
                return entry.program
        return None

    def keep(self, signature: Hashable, trace: Trace, program: Program) -> None:
        """Notes the program of a trace, for all microbatches that take its path."""
        entries = self._entries.setdefault(signature, [])
        if trace.reads_data and trace.path is None:
            if not entries:
                log.warning(
                    "Every microbatch is traced again: Python reads values of the batch in a way that cannot "
                    "be followed (random numbers, NumPy arrays, changes of what a tensor's memory is)."
                )
            entries[:] = [entry for entry in entries if entry.program is not program]
        entries.insert(0, _Entry(program, trace.reads_data, trace.path))
        del entries[_PATHS_KEPT:]
