"""The search for placements of parameters, on tensors without data.

::

    units = units_of(model, args, units=["layers.0", "layers.1"], results=lambda output: [output.loss])
    found = find_placements(units, num_ranks=4, prices=group.prices)
    print(found.explanation)
    divide(model, found.placements, group)

The way of a plan, file by file:

    ====================== ================================================================================
    `unit.py`              A call of a module; what kind it is. `units_of` takes a model apart into units.
    `material.py`          What the tensors of a step are made of: shapes alone, or random numbers.
    `recording.py`         One step of a unit, written down below autograd.
    `flow.py`              Follows a plan through that step: what it costs, operation by operation.
    `cut_candidates.py`    Which cuts of a parameter are worth a try: views of its results say so.
    `role.py`              Parameters that get one placement: of all layers of a kind, or tied.
    `search.py`            Starts, moves and what follows from them; the cheapest plan wins.
    `plan_price.py`        Work, exchange and memory of a plan.
    `explanation.py`       How it was found, printed.
    `dry_run.py`           Runs a plan on divided tensors without data: what a rank sends, to the byte.
    `timed_run.py`         Runs it with data: what a rank's part takes.
    ====================== ================================================================================

A module whose way depends on values is recorded on random numbers. What cannot be recorded is kept whole, and
said to be (`FoundPlacements.kept_whole`): a module that looks at values in a unit too large for that, or a
unit.
"""

from shardwright.torch.tensor_parallel.search.dry_run import (
    CutTensor,
    DividedOperations,
    DryRun,
    Phase,
    TimedRun,
    dry_run,
    dry_run_of_operation,
)
from shardwright.torch.tensor_parallel.search.found_placements import FoundPlacements, WorkShares
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Material, Unit, is_small, results_of, units_of

__all__ = [
    "CutTensor",
    "DividedOperations",
    "DryRun",
    "FoundPlacements",
    "Material",
    "Phase",
    "TimedRun",
    "Unit",
    "WorkShares",
    "dry_run",
    "dry_run_of_operation",
    "find_placements",
    "group_without_ranks",
    "is_small",
    "results_of",
    "units_of",
]
