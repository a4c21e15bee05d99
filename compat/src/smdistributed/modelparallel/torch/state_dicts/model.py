"""States of the wrapped model: all of it, or what this rank has of it.

::

    state_dict()          the whole model on every rank of the replica; all of them call it
    local_state_dict()    what this rank holds, and the key _smp_is_partial
    load_state_dict()     takes both: of the whole each rank takes what it holds, and parts of
                          other partitions go from rank to rank
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

import shardwright.torch as sw
from shardwright.run.joint_calls import meet
from shardwright.torch.optimizer.optimizer_state import PARTS, parts_entry
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.partition_file import store_partition
from smdistributed.modelparallel.torch.deferred_calls import model_is_there
from smdistributed.modelparallel.torch.state_dicts.names import (
    PARTIAL,
    check_names,
    shapes_in,
    without_prefix,
)
from smdistributed.modelparallel.torch.state_dicts.tensor_parts import as_parts, as_whole
from smdistributed.modelparallel.torch.state_mod import current_run, state


class ModelStates(sw.DistributedModel):
    """The part of ``smp.DistributedModel`` that saves and loads."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        if state.configuration is not None and state.configuration.values["partition_file"]:
            self.when_settled(store_partition)
        model_is_there(self)

    def state_dict(  # type: ignore[override]
        self,
        gather_to_rank0: bool = False,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The whole model's state, under the names of the user's module; collective over the replica.

        Args:
            gather_to_rank0: only the first rank of the replica gets it; the others get an empty dictionary.
        """
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        run = current_run()
        if gather_to_rank0 and self.partitioned and run.rank != run.replica_ranks[0]:
            return OrderedDict()
        return state

    def local_state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """The parameters and persistent buffers that this rank holds, and ``_smp_is_partial``.

        Of a tensor that a tensor-parallel group shares it has this rank's part, and says in ``tensor_parts``
        how it is cut. Where replicas share parameters, it has all rows of them; then it is collective over
        the ranks that do.
        """
        if self.replicas.sharding is not None:
            run = current_run()
            meet("model.local_state_dict()", run.mesh.group("dp_shard", run.rank))
        with self.replicas.all_rows():
            copies = self.replicas.sharding is not None
            parts, cuts = as_parts(self._held(keep_vars))
            state: dict[str, Any] = OrderedDict(
                (name, _copy(value) if copies else value) for name, value in parts.items()
            )
        if cuts:
            state[PARTS] = parts_entry(cuts)
        state[PARTIAL] = True
        return state

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Loads a state of the whole model, or what this rank had saved of it.

        Each rank takes what it holds; before the first step, what it is going to hold.

        Args:
            state_dict: from `state_dict`, or from `local_state_dict` on each rank its own; loading that is
                collective over the replica.
            same_partition_load: parts are of the same partition, so that no rank needs those of another.
        """
        state = dict(state_dict)
        own = shapes_in(self._state.described())
        is_partial = bool(state.pop(PARTIAL, False))
        state = as_whole(state, state.pop(PARTS, None))
        state = without_prefix(state, own)
        if is_partial and current_run().mesh.pipeline > 1:
            return self._load_parts(state, own, strict=strict, same=same_partition_load)
        found = shapes_in(state)
        check_names(own, found, source="the state", strict=strict)
        super().load_state_dict(_completed(state, own), strict=False, assign=assign)
        return _difference(own, found)

    # ---- parts ----

    def _load_parts(
        self,
        part: dict[str, Any],
        own: Mapping[str, tuple[int, ...] | None],
        *,
        strict: bool,
        same: bool,
    ) -> Any:
        """Loads the parts that the ranks of the replica have; collective over them."""
        meet("model.load_state_dict() with _smp_is_partial", current_run().pipeline_ranks)
        known = allgather((shapes_in(part), same), CommGroup.PP_GROUP)
        together = {name: shape for shapes, _ in known for name, shape in shapes.items()}
        check_names(own, together, source="the partial state of all ranks", strict=strict)
        if all(wanted for _, wanted in known) or self._parts_are_of_now([set(shapes) for shapes, _ in known]):
            whole = part
        else:
            whole = {}
            for each in allgather(part, CommGroup.PP_GROUP):
                whole.update(each)
        super().load_state_dict({**self._state.described(), **_completed(whole, own)}, strict=False)
        return _difference(own, together)

    def _parts_are_of_now(self, parts: list[set[str]]) -> bool:
        """Whether each rank has just what it holds; the same answer on every rank of the replica."""
        if not self.partitioned:
            return False
        held = set(self._held(False)) <= parts[current_run().pipeline_rank]
        return all(allgather(held, CommGroup.PP_GROUP))

    # ---- what is here ----

    def local_state(self) -> dict[str, Any]:
        """What this rank holds, as it is; of shared parameters the rows that are at hand."""
        return self._held(False)

    def names_of_state(self) -> list[str]:
        """Names in the state of the whole model, in its order."""
        return list(self._state.described())

    def _held(self, keep_vars: bool) -> dict[str, Any]:
        """What this rank has memory for of the module's own state."""
        state = self._state.described(keep_vars=keep_vars)
        if not self.partitioned:
            return state
        return {name: value for name, value in state.items() if not _is_meta(value)}


def _difference(own: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    """What `nn.Module.load_state_dict` returns."""
    missing = [name for name in own if name not in found]
    return _IncompatibleKeys(missing, [name for name in found if name not in own])


def _completed(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The names that the model has; with strict=False others may be there as well."""
    return {name: value for name, value in state.items() if name in own}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
