"""The search for placements of parameters, on tensors without data.

::

    found = find_placements({"": Unit(model, args)}, num_ranks=4, prices=group.prices)
    divide(model, found.placements, group)

The way of a plan, file by file:

    ====================== ================================================================================
    `unit.py`              A call of a module, its kind, its tensors, and parameters that get one placement.
    `recording.py`         One step of a unit, written down below autograd.
    `flow.py`              Follows a plan through that step, and tells which cuts of a parameter to try;
                           `ways.py` decides each operation once.
    `search.py`            Starts, moves and what follows from them; the cheapest plan wins.
    `dry_run.py`           Runs a plan as a rank does: without data, to the byte; with data, for a clock.
    ====================== ================================================================================

A module whose way depends on values is recorded on random numbers. What cannot be recorded is kept whole, and
said to be (`FoundPlacements.kept_whole`): a module that looks at values in a unit too large for that, or a
unit.
"""
