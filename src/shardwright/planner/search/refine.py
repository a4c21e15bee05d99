"""Moves the cuts of an option to shorten its simulated step.

The slowest stage, which `partition.split` makes as fast as possible, is not the whole story. Cuts are
simulated only if the lower bound of the step leaves room for a gain.
"""

import itertools
from math import comb, inf

from shardwright.planner.partition.cuts import improve
from shardwright.planner.search.draft import make_draft
from shardwright.planner.search.option import Option

__all__ = ["refine"]

# So many ways to cut are all looked at.
_FEW_PARTITIONS = 100

# Sums of the same seconds in another order differ by less.
_ROUNDING = 1 + 1e-9

Cuts = tuple[int, ...]


def refine(option: Option, *, max_actions: int) -> Option:
    """Moves cuts while the simulated step gets shorter; of a few ways to cut, finds the best of all."""
    actions = sum(map(len, option.schedule.actions))
    if 2 * option.layout.num_stages * actions > max_actions:
        return option
    trials = _Trials(option, max_trials=max_actions / actions)
    best = improve(trials.start, key=trials.key)
    num_atoms, inner = option.workload.chain.num_atoms, len(best) - 2
    if comb(num_atoms - 1, inner) <= _FEW_PARTITIONS:
        # One cut or a few neighbours at a time do not lead everywhere; the bound makes looking cheap.
        others = itertools.combinations(range(1, num_atoms), inner)
        best = min([best, *((0, *cuts, num_atoms) for cuts in others)], key=trials.key)
    return trials.simulated[best]


class _Trials:
    """The other cuts that were tried for one option.

    Attributes:
        start: the option's own cuts, in atoms.
        simulated: the options that were worked out, by their cuts.
    """

    def __init__(self, option: Option, *, max_trials: float) -> None:
        atom_at = {call: atom for atom, call in enumerate(option.workload.chain.starts)}
        self.start: Cuts = tuple(atom_at[cut] for cut in option.layout.cuts)
        self.simulated = {self.start: option}
        self._option = option
        self._max_trials = max_trials
        self._hopeless: set[Cuts] = set()
        self._shortest_s = option.step_s if option.fits else inf

    def key(self, cuts: Cuts) -> tuple[float, ...]:
        """The key to minimise: excess bytes, then seconds; infinite for cuts that are not worked out."""
        if cuts not in self.simulated and not self._simulate(cuts):
            return (inf,)
        found = self.simulated[cuts]
        return max(0, found.overflow_bytes), found.step_s

    def _simulate(self, cuts: Cuts) -> bool:
        if cuts in self._hopeless or len(self.simulated) >= self._max_trials:
            return False
        workload, option = self._option.workload, self._option
        calls = tuple(workload.chain.starts[cut] for cut in cuts)
        draft = make_draft(workload, option.kind, option.layout.ranks, cuts=calls)
        if draft.least_s > self._shortest_s * _ROUNDING:
            self._hopeless.add(cuts)
            return False
        found = self.simulated[cuts] = draft.work_out()
        if found.fits:
            self._shortest_s = min(self._shortest_s, found.step_s)
        return True
