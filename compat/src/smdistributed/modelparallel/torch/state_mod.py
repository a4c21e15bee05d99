"""The state of a run under the names that scripts look for: ``smp.state``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.torch.startup import ScriptRun, script_run
from smdistributed.modelparallel.configuration import Configuration, Settings
from smdistributed.modelparallel.ranks_of_run import present_run, ranks_of_run


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
        module_manager: what is known of the wrapped model.
        wants_distributed_modules: the script has asked for distributed modules.
        resumed_from: the checkpoint whose partition this run has; "" for none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the run."""
        ranks_of_run.reset()
        self.module_manager = ModuleManager()
        self.wants_distributed_modules = False
        self.resumed_from = ""

    def begin(self, configuration: Configuration) -> None:
        """Takes note of a run that `shardwright.torch` has begun with these settings."""
        self.reset()
        ranks_of_run.begin(configuration)

    @property
    def configuration(self) -> Configuration | None:
        """The settings that ``smp.init`` read; None before."""
        return ranks_of_run.configuration

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` was called."""
        return ranks_of_run.initialized

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
        """Names of the parameters of the optimizer -> their positions in it, by tensor parallel rank.

        All ranks of a tensor-parallel group have the same parameters, or parts of them.
        """
        optimizer = self.optimizer
        names = {} if optimizer is None else optimizer.param_name_to_index()
        return [dict(names) for _ in range(current_run().mesh.tensor)]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """The same, from positions to names."""
        return [{index: name for name, index in names.items()} for names in self.param_name_to_index_tp_group]


state = State()


def _as_it_is(current: ScriptRun, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a plan or the command line may have decided otherwise than the script."""
    config, mesh = current.config, current.mesh
    found = {
        "partitions": mesh.pipeline,
        "pipeline_parallel_degree": mesh.pipeline,
        "tensor_parallel_degree": mesh.tensor,
        "microbatches": config.microbatches or 1,
        "sharded_data_parallel_degree": mesh.shard,
        "ddp": values["ddp"] or mesh.data > 1,
    }
    for key in ("fp16", "bf16", "shard_optimizer_state", "auto_partition", "optimize"):
        found[key] = getattr(config, key)
    return found


def current_run() -> ScriptRun:
    """The run that ``smp.init`` began."""
    present_run()
    return script_run()
