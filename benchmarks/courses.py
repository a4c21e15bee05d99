"""Which races are run: sections A to D."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from models import Task, conv_net, equal_blocks, gpt
from peer_pipelining import KINDS
from race import Final, Match, Result, race

__all__ = ["Course", "courses"]

_FAMILIES = {
    "1F1B": (("1F1B",), "1f1b"),
    "interleaved": (("Interleaved1F1B",), "interleaved_1f1b"),
    "zero bubble": (("InterleavedZeroBubble", "ZBVZeroBubble"), "zb_v"),
}
"""Of each family of schedules, the peer's names and ours. Of several, the fastest is met."""

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
        matches: who of ours meets whom in the finals.
    """

    section: str
    task: Task
    ranks: int
    microbatches: int
    names: tuple[str, ...]
    matches: tuple[Match, ...]

    def __str__(self) -> str:
        return f"{self.section}: {self.task.name}, {self.ranks} ranks, {self.microbatches} microbatches"

    def run(self, *, rounds: int, patience_s: float) -> tuple[list[Result], list[Final]]:
        """Runs it."""
        return race(
            self.section,
            self.task,
            self.names,
            self.matches,
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
    peer, ours, matches = [], [], []
    if "A" in sections:
        for family, (theirs, own) in _FAMILIES.items():
            peer += theirs
            ours.append(own)
            matches.append(_match("A", f"{family}: ours / peer, same stages", own, theirs))
        ours += _MORE_OF_OURS
    if "B" in sections:
        peer, ours = [*KINDS], [*ours, "free"]
    if not peer:
        return
    for ranks, layers in ((2, 12), (4, 16)):
        for microbatches in (4, 8):
            # DualPipeV asks for as many microbatches as there are stages.
            fitting = [kind for kind in peer if kind != "DualPipeV" or microbatches >= 2 * ranks]
            chosen = [_match("B", "chosen by the library / best of the peer's", "free", fitting)]
            yield Course(
                section="".join(letter for letter in "AB" if letter in sections),
                task=gpt(layers=layers),
                ranks=ranks,
                microbatches=microbatches,
                names=(*(f"peer {kind}" for kind in fitting), *(f"ours {kind}" for kind in ours)),
                matches=(*matches, *(chosen if "B" in sections else ())),
            )


def _match(section: str, what: str, ours: str, theirs: Sequence[str]) -> Match:
    rivals = tuple(f"peer {kind}" for kind in theirs)
    return Match(section=section, what=what, ours=f"ours {ours}", rivals=rivals)


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
                matches=(_match("C", f"{task.name}: planned / peer's even split", "free", _RIVALS_OF_FREE),),
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
            matches=tuple(
                Match(
                    section="D",
                    what=f"{ranks} ranks, {kind}: speed-up over one process / 1F1B's ideal",
                    ours=f"ours {kind}",
                    rivals=("plain batch", "plain microbatches"),
                )
                for kind in ("1f1b", "free")
            ),
        )


def _tiny(task: Task) -> Task:
    if "VGG" in task.name:
        return conv_net(width=2, size=32, batch=8)
    if "equal" in task.name:
        return equal_blocks(layers=4, width=16, length=8)
    return gpt(layers=4, width=16, vocab=64, length=8, name=f"tiny {task.name}")
