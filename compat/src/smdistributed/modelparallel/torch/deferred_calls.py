"""What a script asks for before it wraps its model, and what waits for that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.torch.state_mod import current_run


@dataclass(slots=True)
class _Waiting:
    """Calls that wait for the model of a run."""

    run: ScriptRun | None = None
    calls: list[Callable[[Any], None]] = field(default_factory=list)


_WAITING = _Waiting()


def when_model_is_there(call: Callable[[Any], None]) -> None:
    """Has something called with the wrapped model: now, or as soon as there is one."""
    run = current_run()
    if run.model is not None:
        call(run.model)
        return
    if _WAITING.run is not run:
        _WAITING.run, _WAITING.calls = run, []
    _WAITING.calls.append(call)


def model_is_there(model: Any) -> None:
    """Calls what has waited for the model of this run."""
    if _WAITING.run is current_run():
        calls, _WAITING.calls = _WAITING.calls, []
        for call in calls:
            call(model)
