"""States of the wrapped optimizer: all of it in PyTorch's format, or what this rank has of it.

In the whole, parameters are numbered as in the optimizer that the script made from the whole model, so that
one that was made so anywhere loads it. What PyTorch's format has no place for stands beside it: copies in
float32 of parameters in 16 bits, and the loss scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.run.joint_calls import meet
from shardwright.torch.startup import ScriptRun
from shardwright.torch.tensor_parallel.divide import cut_of, placed_like
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup, members
from smdistributed.modelparallel.torch.deferred_calls import when_model_is_there
from smdistributed.modelparallel.torch.state_dicts.names import PARTIAL
from smdistributed.modelparallel.torch.state_dicts.optimizer_checks import (
    check_shapes,
    refuse_other_groups,
    refuse_part,
    refuse_unknown,
)
from smdistributed.modelparallel.torch.state_dicts.optimizer_entries import (
    MASTER,
    Entries,
    entries_in,
    own_part,
    parts_of,
    put_together,
)
from smdistributed.modelparallel.torch.state_dicts.tensor_parts import (
    MASTERS,
    entries_as_parts,
    entries_as_whole,
)
from smdistributed.modelparallel.torch.state_mod import current_run

_NAMES = "parameter_names"
_PART = "part"
_SCALER = "loss_scaler"


class OptimizerStates(sw.DistributedOptimizer):
    """The part of ``smp.DistributedOptimizer`` that saves and loads."""

    def __init__(self, optimizer: Optimizer, **options: Any):
        self._members: list[list[nn.Parameter]] = []
        self._order: list[list[str]] | None = None
        self._waiting: dict[str, Any] | None = None
        super().__init__(optimizer, **options)

    def keep(self, identifiers: set[int]) -> None:
        """Drops the parameters of other ranks, and keeps their names."""
        self._note_order()
        super().keep(identifiers)

    # ---- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The whole state; collective over the replica, and over all ranks where they share the state."""
        if self._waiting is not None:
            return self._of_waiting(partial=False)
        run = current_run()
        if not self._is_spread(run):
            return self._as_one(self._entries_here(run)) if run.model is not None else self.orig_state_dict()
        shared = _is_shared(run)
        meet("optimizer.state_dict()", None if shared else run.replica_ranks)
        entries = put_together(
            allgather(self._parts_here(run), CommGroup.WORLD if shared else CommGroup.MP_GROUP)
        )
        return self._as_one(entries)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of the parameters of this rank, and ``_smp_is_partial``.

        Args:
            gather_if_shard: with ``shard_optimizer_state``, the first replica gets the state whole, and all
                replicas call this; else each rank keeps its part.
        """
        if self._waiting is not None:
            return self._of_waiting(partial=True)
        run = current_run()
        state = self.live_state_dict()
        if run.model is not None:
            masters = self._masters_here(run)
            if masters:
                state[MASTERS] = masters
            if run.model.scaling is not None:
                state[_SCALER] = asdict(run.model.scaling.scaler)
            updated = run.model.replicas.updated_parts
            if gather_if_shard and updated is not None and updated.num_parts > 1:
                meet("optimizer.local_state_dict(gather_if_shard=True)", members(CommGroup.DP_GROUP))
                whole = put_together(allgather(self._parts_here(run), CommGroup.DP_GROUP))
                if run.data_rank == 0:
                    state = self._local_of(whole, state)
        state[PARTIAL] = True
        return entries_as_parts(state)

    def orig_state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer itself, as PyTorch gives it."""
        return self.optimizer.state_dict()

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The same as `local_state_dict`, under the name that scripts for several releases use."""
        return self.local_state_dict(gather_if_shard=gather_if_shard)

    # ---- loading ----

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state, or what this rank had saved of one.

        Before the first step it waits for it; options of the groups (learning rates) hold at once. Parts of
        other partitions go from rank to rank: then it is collective over the replica.
        """
        state, run = dict(state_dict), current_run()
        refuse_other_groups(state, len(self.param_groups))
        model = run.model
        if model is not None and model.settled:
            self._load(state)
        elif model is None and not state.get(PARTIAL) and MASTERS not in state:
            self._waiting = None
            super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        else:
            self._load_options(state["param_groups"])
            self._waiting = state
            when_model_is_there(lambda model: model.when_settled(self._load_waiting))

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """The same as `load_state_dict`, under the name that scripts for several releases use."""
        self.load_state_dict(state_dict)

    def _load_waiting(self) -> None:
        state, self._waiting = self._waiting, None
        if state is not None:
            options = [_options(group) for group in self.param_groups]
            self._load(state)
            for group, now in zip(self.param_groups, options, strict=True):
                group.update(now)  # schedulers may have changed them meanwhile

    def _load(self, state: dict[str, Any]) -> None:
        run = current_run()
        is_partial = bool(state.pop(PARTIAL, False))
        state = entries_as_whole(state)
        masters, scaler = state.pop(MASTERS, {}), state.pop(_SCALER, None)
        names = state.get(_NAMES)
        if is_partial and self._is_of_here(run, names):
            gathered = _is_shared(run) and not state.get(_PART)
            if gathered or (run.mesh.tensor > 1 and not state.get(_PART)):
                # It is whole: this rank takes its part now.
                entries = entries_in(state, masters, self._names_here(run))
                self._take_own(run, entries, state["param_groups"])
            else:
                super().load_state_dict(self._in_parts(state))
                self._set_masters(run, masters)
        else:
            numbered = self._numbered_names() if names is None else names
            entries = entries_in(state, masters, numbered)
            if names is not None:
                refuse_part(state.get(_PART))
                numbered, entries = self._of_all_ranks(run, numbered, entries)
            refuse_unknown(self._names_here(run), numbered)
            self._take_own(run, entries, state["param_groups"])
        if scaler is not None and run.model is not None and run.model.scaling is not None:
            run.model.scaling.scaler.restore(scaler)

    def _in_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of this rank, with parts of what a tensor-parallel group shares: it has come whole."""
        parameters = self._parameters()
        return {
            **state,
            "state": {
                number: {key: _placed_as(parameters[number], value) for key, value in entry.items()}
                for number, entry in state["state"].items()
            },
        }

    def _is_of_here(self, run: ScriptRun, names: Sequence[str] | None) -> bool:
        """Whether a partial state is of the parameters of this rank, and so on all ranks of the replica."""
        same = list(names or ()) == self._parameter_names()
        if run.mesh.pipeline == 1:
            return names is None or same
        meet("optimizer.load_state_dict() with _smp_is_partial", run.pipeline_ranks)
        return all(allgather(same, CommGroup.PP_GROUP))

    def _of_all_ranks(
        self, run: ScriptRun, names: Sequence[str], entries: Entries
    ) -> tuple[list[str], Entries]:
        """Brings together what the ranks of the replica have loaded: names of parameters, and state."""
        if run.mesh.pipeline == 1:
            return list(names), entries
        of_ranks = allgather((list(names), entries), CommGroup.PP_GROUP)
        together = {name: entry for _, found in of_ranks for name, entry in found.items()}
        return [name for known, _ in of_ranks for name in known], together

    def _take_own(self, run: ScriptRun, entries: Entries, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the state of the parameters of this rank from that of all."""
        model = run.model
        assert model is not None
        names = self._names_here(run)
        state: dict[int, dict[str, Any]] = {}
        masters: dict[int, Tensor] = {}
        for number, (name, parameter) in enumerate(zip(names, self._parameters(), strict=True)):
            entry = entries.get(name, {})
            check_shapes(name, parameter, entry)
            own = {key: own_part(model, self, parameter, key, value) for key, value in entry.items()}
            if MASTER in own:
                masters[number] = own.pop(MASTER)
            if own:
                state[number] = own
        super().load_state_dict({"state": state, "param_groups": self._groups_here(groups)})
        self._set_masters(run, masters)

    def _set_masters(self, run: ScriptRun, masters: Mapping[int, Tensor]) -> None:
        updated = None if run.model is None else run.model.replicas.updated_parts
        if updated is not None and updated.keeps_masters:
            parameters = self._parameters()
            for number, master in masters.items():
                parameter = parameters[number]
                own = _placed_as(parameter, master.to(parameter.device, copy=True).float())
                updated.set_master(parameter, own)

    # ---- names and numbers ----

    def _note_order(self) -> None:
        """Takes note of the parameters of each group, before some are dropped."""
        groups = [list(group["params"]) for group in self.param_groups]
        names = self._names_of_model()
        if not names:
            self._members = groups
            return
        before = self._order or [[names.get(id(p), "") for p in group] for group in self._members]
        before += [[] for _ in groups[len(before) :]]
        now = ([names.get(id(p), "") for p in group] for group in groups)
        self._order = [list(dict.fromkeys([*a, *b])) for a, b in zip(before, now, strict=True)]
        self._members = []

    def _numbered_names(self) -> list[str]:
        """Names of all parameters in the order of the whole model's optimizer."""
        return [name for group in self._names_by_group() for name in group]

    def _names_by_group(self) -> list[list[str]]:
        self._note_order()
        run = current_run()
        own = self._order or []
        if not self._is_spread(run):
            return own
        orders = allgather(own, CommGroup.PP_GROUP)
        if all(order == own for order in orders):
            return own
        # Made from the parameters of each rank: in the order of the model.
        known = list(self._names_of_model().values())
        place = {name: number for number, name in enumerate(known)}
        return [
            sorted({name for order in orders for name in order[i]}, key=lambda name: place.get(name, -1))
            for i in range(len(own))
        ]

    def _names_of_model(self) -> dict[int, str]:
        model = current_run().model
        if model is None:
            return {}
        return {id(parameter): name for name, parameter in model.get_module().named_parameters()}

    def _names_here(self, run: ScriptRun) -> list[str]:
        names = self._names_of_model()
        return [names.get(id(parameter), "") for parameter in self._parameters()]

    def names_here_by_group(self) -> list[list[str]]:
        """Names of the parameters of this rank, by group."""
        names = self._names_of_model()
        return [[names.get(id(p), "") for p in group["params"]] for group in self.param_groups]

    # ---- forms ----

    def _is_spread(self, run: ScriptRun) -> bool:
        """Whether other ranks have state that this one has not."""
        model = run.model
        return model is not None and model.settled and (run.mesh.spreads_model or _is_shared(run))

    def _entries_here(self, run: ScriptRun) -> Entries:
        return put_together([self._parts_here(run)])

    def _parts_here(self, run: ScriptRun) -> Entries:
        assert run.model is not None
        return parts_of(run.model, self, names=self._names_of_model())

    def _masters_here(self, run: ScriptRun) -> dict[int, Tensor]:
        updated = None if run.model is None else run.model.replicas.updated_parts
        found = {} if updated is None else {n: updated.master(p) for n, p in enumerate(self._parameters())}
        return {number: master.detach() for number, master in found.items() if master is not None}

    def _as_one(self, entries: Entries) -> dict[str, Any]:
        """A whole state in PyTorch's format."""
        groups, state, masters, number = [], {}, {}, 0
        for group, names in zip(self.param_groups, self._names_by_group(), strict=True):
            groups.append({**_options(group), "params": list(range(number, number + len(names)))})
            for name in names:
                entry = dict(entries.get(name, {}))
                if MASTER in entry:
                    masters[number] = entry.pop(MASTER)
                if entry:
                    state[number] = entry
                number += 1
        whole: dict[str, Any] = {"state": state, "param_groups": groups}
        if masters:
            whole[MASTERS] = masters
        model = current_run().model
        if model is not None and model.scaling is not None:
            whole[_SCALER] = asdict(model.scaling.scaler)
        return whole

    def _local_of(self, whole: Entries, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of this rank's parameters, from what all of their replicas have."""
        local = {key: value for key, value in state.items() if key not in (_PART, MASTERS)}
        named = enumerate(self._names_here(current_run()))
        entries = {number: dict(whole[name]) for number, name in named if name in whole}
        masters = {number: entry.pop(MASTER) for number, entry in entries.items() if MASTER in entry}
        return {**local, "state": entries, **({MASTERS: masters} if masters else {})}

    def _groups_here(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Groups with the options that were saved, and the parameters of this rank."""
        found, number = [], 0
        for group, saved in zip(self.param_groups, groups, strict=True):
            count = len(group["params"])
            found.append({**saved, "params": list(range(number, number + count))})
            number += count
        return found

    def _of_waiting(self, *, partial: bool) -> dict[str, Any]:
        """What was loaded, as long as it waits for the first step, with the options of now."""
        waiting = self._waiting
        assert waiting is not None
        if not partial and waiting.get(PARTIAL):
            raise UsageError(
                "a partial state was loaded into the optimizer, and each rank takes its own of it in the "
                "first step. Call state_dict() after it, or local_state_dict()."
            )
        groups = [
            {**saved, **_options(now)}
            for saved, now in zip(waiting["param_groups"], self.param_groups, strict=True)
        ]
        return {**waiting, "param_groups": groups, **({PARTIAL: True} if partial else {})}


def _placed_as(parameter: Tensor, value: Any) -> Any:
    """This rank's part of something in the state of a parameter that ranks share, if that has its shape."""
    if not isinstance(value, Tensor) or cut_of(parameter) is None or value.shape != parameter.shape:
        return value
    return value if cut_of(value) is not None else placed_like(value, parameter)


def _is_shared(run: ScriptRun) -> bool:
    """Whether replicas have different parts of the state."""
    updated = None if run.model is None else run.model.replicas.updated_parts
    return run.mesh.shard > 1 or (updated is not None and updated.num_parts > 1)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
