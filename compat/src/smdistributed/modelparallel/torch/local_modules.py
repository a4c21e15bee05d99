"""Which modules belong to a rank.

Each belongs to one pipeline rank: a unit, and what is inside, to the rank that runs it; a module around units
to the rank of the first of them; any other to the rank of the module around it.
"""

from collections.abc import Iterator

from torch import nn

from shardwright.torch.startup import ScriptRun


def local_named_modules(
    model: nn.Module, run: ScriptRun, *, partitioned: bool
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of this rank, by their names; all of them as long as the model is whole."""
    ranks = _ranks_of_units(run) if partitioned and run.mesh.pipeline > 1 else {}
    for name, module in model.named_modules():
        if not ranks or _rank_of(name, ranks) == run.pipeline_rank:
            yield name, module


def _ranks_of_units(run: ScriptRun) -> dict[str, int]:
    """Name of a unit -> the pipeline rank that calls it first, in the order of the calls."""
    found: dict[str, int] = {}
    for stage in run.plan.stages if run.plan is not None else ():
        for label in stage.units:
            found.setdefault(label.split("#")[0], stage.rank)
    return found


def _rank_of(name: str, ranks: dict[str, int]) -> int:
    path = name
    while True:
        if path in ranks:
            return ranks[path]
        inside = f"{path}." if path else ""
        for unit, rank in ranks.items():
            if unit.startswith(inside):
                return rank
        path = path.rpartition(".")[0]
