"""Gathers the state of the whole model from the ranks, and loads each rank's share of it."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.run.failure import first_cause_named
from shardwright.run.joint_calls import meet, ranks_with_the_model
from shardwright.torch.parameters.gathering import gather_state
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.replicas.replicas import Replicas


class ModelState:
    """Gathers the state of a model over stages and shards, and loads it."""

    def __init__(self, module: nn.Module, replicas: Replicas, materialiser: Materialiser):
        self._module = module
        self._replicas = replicas
        self._materialiser = materialiser
        self._residency: Residency | None = None
        self._waiting: Mapping[str, Any] | None = None
        self._gathers = False

    def placed(self, residency: Residency) -> None:
        """Records which rank holds each parameter and buffer."""
        self._residency = residency
        self._module.register_state_dict_post_hook(_OwnPart(self))  # type: ignore[no-untyped-call]

    def whole(self, destination: dict[str, Any] | None, prefix: str, *, keep_vars: bool) -> dict[str, Any]:
        """The state under the names of the user's module; collective over the replica."""
        if self._residency is not None or self._replicas.sharding is not None:
            meet("model.state_dict()", ranks_with_the_model())
        with self._replicas.all_rows():
            if self._residency is None or context().groups.pipeline is None:
                given = {} if destination is None else {"destination": destination}
                state = self._module.state_dict(**given, prefix=prefix, keep_vars=keep_vars)
                if self._replicas.sharding is not None:
                    state.update({key: _copy(value) for key, value in state.items()})
                return state
            full = self._gathered(self._residency, keep_vars=keep_vars)
        if destination is None and not prefix:
            return full
        target = OrderedDict() if destination is None else destination
        target.update((f"{prefix}{key}", value) for key, value in full.items())
        return target

    def described(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """The module's own state; what other ranks hold of it has shapes and no values."""
        with self._of_this_rank():
            state: dict[str, Any] = self._module.state_dict(keep_vars=keep_vars)
        return state

    def _gathered(self, residency: Residency, *, keep_vars: bool) -> dict[str, Any]:
        """The state of all stages."""
        with self._of_this_rank(), first_cause_named(context()):
            state = self._module.state_dict(keep_vars=keep_vars)
            return gather_state(state, self._module, residency, context())

    @contextmanager
    def _of_this_rank(self) -> Iterator[None]:
        """Says that states without the values of other ranks are meant to be."""
        before, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = before

    def load(self, state: Any, *, strict: bool, assign: bool = False) -> Any:
        """Loads the state of the whole model; each rank takes its share.

        Before the first step of a model on the meta device, it is kept until then.
        """
        if self._replicas.sharding is not None:
            meet("model.load_state_dict()", context().mesh.group("dp_shard", context().rank))
        if self._residency is None and self._materialiser.waits and not assign:
            # There is nowhere to put it yet: each rank takes its part when it knows which that is.
            self._waiting = state
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*no-op.*")
                return self._module.load_state_dict(state, strict=strict)
        with self._replicas.all_rows(written=True):
            if self._residency is not None:
                return self._module.load_state_dict(self._own_of(state), strict=strict)
            # Wrappers of scripts, whose load_state_dict is their own, may not know `assign`.
            options = {"assign": True} if assign else {}
            return self._module.load_state_dict(state, strict=strict, **options)

    @property
    def waits(self) -> bool:
        """Whether a state waits for this rank to have its part."""
        return self._waiting is not None

    def load_waiting(self) -> bool:
        """Loads a state that has waited for this rank to have its part; says whether one has."""
        if self._waiting is None:
            return False
        state, self._waiting = self._waiting, None
        self.load(state, strict=False)
        return True

    def _own_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state with what other ranks hold left as it is here: without values."""
        own = self.described()
        return {name: own[name] if _is_meta(own.get(name)) else value for name, value in state.items()}

    def refuse_part(self, state: Mapping[str, Any]) -> None:
        """Keeps a script from saving the part of a rank as if it were the model."""
        if not self._gathers and any(_is_meta(value) for value in state.values()):
            raise UsageError(
                f"{user_line()}: the module's own state_dict() has the weights of this rank only: the model "
                "is spread over stages. Call model.state_dict() of the DistributedModel, on all ranks, and "
                "save it on one."
            )


class _OwnPart:
    """Refuses that the part of a rank is saved as if it were the model: its state, or the module itself."""

    def __init__(self, state: ModelState):
        self._state = state

    def __call__(self, module: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
        self._state.refuse_part(state)

    def __deepcopy__(self, memo: Any) -> "_OwnPart":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{user_line()}: the module inside of DistributedModel has the weights of this rank only: the "
            "model is spread over stages. Save model.state_dict(), called on all ranks, and load it into a "
            "module that is built anew."
        )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
