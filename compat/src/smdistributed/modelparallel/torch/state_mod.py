"""The state of a run under the names that scripts look for: ``smp.state``."""

from collections.abc import Callable
from typing import Any

from shardwright.torch.context import Context, context, is_initialized
from smdistributed.modelparallel.configuration import Configuration, Settings
from smdistributed.modelparallel.torch.exceptions import NotInitializedError

__all__ = ["ModuleManager", "State", "current_run", "state"]


class ModuleManager:
    """What belongs to the wrapped model.

    Attributes:
        translate_functions: pairs of functions that translate a state to Hugging Face's names and back.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


class State:
    """The one run of this process.

    Attributes:
        configuration: the settings that ``smp.init`` read; None before.
        module_manager: what belongs to the wrapped model.
    """

    def __init__(self) -> None:
        self.configuration: Configuration | None = None
        self.module_manager = ModuleManager()

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` was called."""
        return is_initialized() and self.configuration is not None

    @property
    def cfg(self) -> Settings:
        """All settings, as attributes, with the library's own defaults."""
        current_run()
        assert self.configuration is not None
        return Settings(self.configuration.values)

    @property
    def model(self) -> Any:
        """The wrapped model; None as long as there is none."""
        return current_run().model

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer; None as long as there is none."""
        optimizers = current_run().optimizers
        return optimizers[0] if optimizers else None


state = State()


def current_run() -> Context:
    """The run that ``smp.init`` began.

    Raises:
        NotInitializedError: it was not called.
    """
    if not is_initialized():
        raise NotInitializedError(
            "smdistributed.modelparallel is not initialised. Call smp.init() first, once on every rank, with "
            "import smdistributed.modelparallel.torch as smp."
        )
    return context()
