"""The state of a run under the names that scripts look for: ``smp.state``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.torch.run.context import is_initialized
from shardwright.torch.script_run import ScriptRun, script_run
from smdistributed.modelparallel.configuration import Configuration, Settings
from smdistributed.modelparallel.torch.exceptions import NotInitializedError

__all__ = ["ModuleManager", "State", "current_run", "state"]


@dataclass(slots=True)
class ModuleManager:
    """What is known of the wrapped model.

    Attributes:
        translate_functions: pairs of functions that translate the names of a state: to Hugging Face's, and
            from them. Empty for a model that nobody knows.
    """

    translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=list)


class State:
    """The one run of this process.

    Attributes:
        configuration: the settings that ``smp.init`` read; None before.
        module_manager: what is known of the wrapped model.
        wants_distributed_modules: the script has asked for distributed modules.
        resumed_from: the checkpoint whose partition this run has; "" for none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the run."""
        self.configuration: Configuration | None = None
        self.module_manager = ModuleManager()
        self.wants_distributed_modules = False
        self.resumed_from = ""
        self._objects_group: dist.ProcessGroup | None = None
        self._lost_object = ""
        self._alone: dist.ProcessGroup | None = None

    def begin(self, configuration: Configuration, objects_group: dist.ProcessGroup | None) -> None:
        """Takes note of a run.

        Args:
            configuration: its settings.
            objects_group: all ranks, for objects; None for a single rank.
        """
        self.reset()
        self.configuration = configuration
        self._objects_group = objects_group

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` was called."""
        return is_initialized() and self.configuration is not None

    @property
    def cfg(self) -> Settings:
        """All settings, as attributes, with the library's own defaults."""
        current = current_run()
        assert self.configuration is not None
        return Settings({**self.configuration.values, **_as_it_is(current, self.configuration.values)})

    @property
    def model(self) -> Any:
        """The wrapped model; None as long as there is none."""
        return current_run().model

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer; None as long as there is none."""
        optimizers = current_run().optimizers
        return optimizers[0] if optimizers else None

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """Names of the parameters of the optimizer -> their positions in it, by tensor parallel rank."""
        optimizer = self.optimizer
        return [{} if optimizer is None else optimizer.param_name_to_index()]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """The same, from positions to names."""
        return [{index: name for name, index in names.items()} for names in self.param_name_to_index_tp_group]

    @property
    def objects_group(self) -> dist.ProcessGroup:
        """All ranks, for objects.

        Raises:
            UsageError: an object is under way that nobody has taken: the next one would be taken for it.
        """
        current_run()
        if self._lost_object:
            raise UsageError(
                f"no object can be sent or received any more after {self._lost_object}. End the script, and "
                "see to it that ranks call smp.send(), smp.recv_from() and smp.broadcast() in the same order."
            )
        assert self._objects_group is not None
        return self._objects_group

    def lose_objects(self, call: str) -> None:
        """Takes note of a call whose object is still under way."""
        self._lost_object = call

    def alone(self) -> dist.ProcessGroup:
        """A group of this rank alone."""
        if self._alone is None:
            self._alone = dist.new_group([current_run().rank], use_local_synchronization=True)
        return self._alone


state = State()


def _as_it_is(current: ScriptRun, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a plan or the command line may have decided otherwise than the script."""
    config, mesh = current.config, current.mesh
    found = {
        "partitions": mesh.pipeline,
        "pipeline_parallel_degree": mesh.pipeline,
        "microbatches": config.microbatches or 1,
        "sharded_data_parallel_degree": mesh.shard,
        "ddp": values["ddp"] or mesh.data > 1,
    }
    for key in ("fp16", "bf16", "shard_optimizer_state", "auto_partition", "optimize"):
        found[key] = getattr(config, key)
    return found


def current_run() -> ScriptRun:
    """The run that ``smp.init`` began.

    Raises:
        NotInitializedError: it was not called.
    """
    if not state.initialized:
        raise NotInitializedError(
            "smdistributed.modelparallel is not initialised: smp.init() was not called. Call it first, once "
            "on every rank, before models, optimizers and questions about ranks."
        )
    return script_run()
