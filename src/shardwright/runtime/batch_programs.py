"""Matches the programs of one batch, whose microbatches may take different paths."""

from collections.abc import Sequence

from shardwright.errors import TraceMismatchError
from shardwright.runtime.rank_program import RankProgram
from shardwright.schedule import Edge

__all__ = ["check_one_order", "homes_of_buffers", "merged_edges"]


def check_one_order(programs: Sequence[RankProgram]) -> None:
    """Refuses a batch for which no one schedule exists."""
    orders = sorted({program.stage_ranks for program in programs})
    if len(orders) > 1:
        first, second = (" -> ".join(map(str, order)) for order in orders[:2])
        raise TraceMismatchError(
            f"the microbatches of one batch go through the ranks in different orders, {first} and {second}, "
            "because the model chooses the order of its layers by values of the batch. Let them choose "
            "which layers run and not in which order, or put the choice inside one module."
        )


def homes_of_buffers(programs: Sequence[RankProgram]) -> dict[str, int]:
    """The pipeline rank on which a batch changes each buffer: one for all microbatches."""
    found: dict[str, int] = {}
    for program in programs:
        for name, rank in program.state.items():
            if found.setdefault(name, rank) != rank:
                raise TraceMismatchError(
                    f"microbatches of one batch change the buffer {name} on different ranks, {found[name]} "
                    f"and {rank}, because the model chooses by values of the batch where it does that, and "
                    "no rank would see all changes. Change it in one place, or inside one module."
                )
    return found


def merged_edges(programs: Sequence[RankProgram]) -> list[Edge]:
    """Transfers between stages for lowering and simulation: those of any of the microbatches.

    Bytes are those of the largest microbatch.
    """
    pairs = {pair for program in programs for pair in program.crossings}
    pairs |= {(source, target) for program in programs for target, source in program.gradients}
    edges = []
    for source, target in sorted(pairs):
        groups = [program.crossings.get((source, target), ()) for program in programs]
        back = [program.gradients.get((target, source), ()) for program in programs]
        edges.append(
            Edge(
                source=source,
                target=target,
                num_bytes=max(sum(c.spec.num_bytes for c in group) for group in groups),
                gradient_bytes=max(sum(c.spec.num_bytes for c in group) for group in back),
                has_gradient=any(back),
            )
        )
    return edges
