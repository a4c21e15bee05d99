"""Which races are run: sections A to D."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from models import Task, conv_net, equal_blocks, gpt
from peer_pipelining import KINDS
from race import Result, race

__all__ = ["FAMILIES", "Course", "courses"]

FAMILIES = {
    "1F1B": (("1F1B",), ("1f1b",)),
    "interleaved": (("Interleaved1F1B",), ("interleaved_1f1b",)),
    "zero bubble": (("InterleavedZeroBubble", "ZBVZeroBubble"), ("zb_v",)),
}
"""Of each family of schedules, the peer's names and ours. A family of several is as fast as its fastest."""

_MORE_OF_OURS = ("zb_h1",)
_RIVALS_OF_FREE = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One race.

    Attributes:
        section: letters of the sections that its results belong to.
        task: what is trained.
        ranks: number of ranks.
        microbatches: parts into which a batch is split.
        names: contestants; see `contestant.contestant`.
    """

    section: str
    task: Task
    ranks: int
    microbatches: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.section}: {self.task.name}, {self.ranks} ranks, {self.microbatches} microbatches"

    def run(self, *, rounds: int, patience_s: float) -> list[Result]:
        """Runs it."""
        return race(
            self.section,
            self.task,
            self.names,
            ranks=self.ranks,
            microbatches=self.microbatches,
            rounds=rounds,
            patience_s=patience_s,
        )


def courses(sections: str, *, quick: bool) -> Iterator[Course]:
    """The races of some sections, ``"ABCD"`` for all of these."""
    found = [*_equal_stages(sections), *_uneven_models(sections), *_against_one_process(sections)]
    if not quick:
        yield from found
        return
    for section in dict.fromkeys(course.section for course in found):
        course = next(course for course in found if course.section == section)
        yield replace(course, task=_tiny(course.task), microbatches=4)


def _equal_stages(sections: str) -> Iterator[Course]:
    """A and B share their races, so that all contestants meet under the same conditions."""
    peer, ours = [], []
    if "A" in sections:
        for theirs, own in FAMILIES.values():
            peer += theirs
            ours += own
        ours += _MORE_OF_OURS
    if "B" in sections:
        peer, ours = [*KINDS], [*ours, "free"]
    if not peer:
        return
    for ranks, layers in ((2, 12), (4, 16)):
        for microbatches in (4, 8):
            # DualPipeV asks for as many microbatches as there are stages.
            fitting = [kind for kind in peer if kind != "DualPipeV" or microbatches >= 2 * ranks]
            yield Course(
                section="".join(letter for letter in "AB" if letter in sections),
                task=gpt(layers=layers),
                ranks=ranks,
                microbatches=microbatches,
                names=(*(f"peer {kind}" for kind in fitting), *(f"ours {kind}" for kind in ours)),
            )


def _uneven_models(sections: str) -> Iterator[Course]:
    if "C" not in sections:
        return
    big_head = gpt(layers=8, vocab=16384, length=128, name="GPT 8 x 256, vocabulary 16384")
    for task in (big_head, conv_net()):
        for ranks in (2, 4):
            yield Course(
                section="C",
                task=task,
                ranks=ranks,
                microbatches=8,
                names=(*(f"peer {kind}" for kind in _RIVALS_OF_FREE), "ours free"),
            )


def _against_one_process(sections: str) -> Iterator[Course]:
    if "D" not in sections:
        return
    for ranks in (2, 4):
        yield Course(
            section="D",
            task=equal_blocks(),
            ranks=ranks,
            microbatches=8,
            names=("plain batch", "plain microbatches", "plain crowd", "ours 1f1b", "ours free"),
        )


def _tiny(task: Task) -> Task:
    if "VGG" in task.name:
        return conv_net(width=2, size=32, batch=8)
    if "equal" in task.name:
        return equal_blocks(layers=4, width=16, length=8)
    return gpt(layers=4, width=16, vocab=64, length=8, name=f"tiny {task.name}")
