"""Records the measured steps of runs beside the cached costs, for later plans to read.

Each run writes a line of JSON, and a second line if it goes on for longer. Unreadable lines, torn or of
another version, are skipped.
"""

import datetime
import fcntl
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, mode

from shardwright.errors import UsageError
from shardwright.files import UserFile, open_to_append, parse_json, replace_file
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import PastRun, RunKind
from shardwright.torch.measuring.cost_cache import cache_folder, machine_key
from shardwright.torch.run.context import Context

__all__ = ["RunHistory", "RunRecorder", "history_of", "past_run"]

log = logging.getLogger(__name__)

_VERSION = 2  # predictions count what the library takes on the machine
_MOST_LINES = 2000
_KEPT_LINES = 1000

_WARM_UP_STEPS = 2
_WRITTEN_AFTER = frozenset({8, 40})


class RunHistory:
    """The runs of one kind of machine.

    Args:
        folder: where costs are kept.
        machine: key of the machine: its device, versions, ranks and cores.
    """

    def __init__(self, folder: Path, machine: str):
        self._file = folder / "runs" / f"{machine}.jsonl"

    def read(self) -> list[PastRun]:
        """All runs that are known, the oldest first."""
        found = []
        for line in self._lines():
            try:
                document = parse_json(line)
                if isinstance(document, dict) and document.pop("version", None) == _VERSION:
                    found.append(PastRun.from_dict(document))
            except ValueError:
                continue
        return found

    def append(self, run: PastRun) -> None:
        """Adds a run; a disk that is full or cannot be written is noted in the log alone."""
        line = json.dumps({"version": _VERSION, **run.to_dict()}) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Other runs wait while one shortens the file: a line that they add would be lost.
            with open_to_append(self._file.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with open_to_append(self._file) as file:
                    file.write(line.encode())
                self._shorten()
        except OSError as error:
            log.warning("what this run took cannot be kept in %s: %s", self._file, error)

    def _shorten(self) -> None:
        lines = self._lines()
        if len(lines) > _MOST_LINES:
            replace_file(self._file, b"".join(line + b"\n" for line in lines[-_KEPT_LINES:]))

    def _lines(self) -> list[bytes]:
        if not self._file.exists():
            return []
        try:
            return list(UserFile(self._file, what="", error=UsageError).read_lines())
        except UsageError as error:
            log.warning("what earlier runs took is not known: %s", error)
            return []


def history_of(context: Context) -> RunHistory | None:
    """The runs of the present machine; None where none are to be kept."""
    if not context.config.calibrate or os.environ.get("SHARDWRIGHT_CACHE") == "off":
        return None
    return RunHistory(cache_folder(), machine_key(context))


@dataclass(slots=True)
class RunRecorder:
    """Records the step time of one run after a while, and again later.

    Attributes:
        history: where to; None writes nothing.
        ranks_per_node: of the machines.
    """

    history: RunHistory | None
    ranks_per_node: int
    _steps: list[tuple[float, float, int]] = field(default_factory=list)
    _run: str = ""

    def step_done(
        self, seconds: float, plan: Plan, *, samples: int, memory_bytes: int, outside_s: float = 0.0
    ) -> None:
        """A training step ended, in all `seconds` long; the first ones plan and warm up.

        Args:
            seconds: of the step.
            plan: that it followed.
            samples: of one replica.
            memory_bytes: peak memory of a rank.
            outside_s: seconds of code outside of the model.
        """
        if len(self._steps) >= max(_WRITTEN_AFTER):
            return
        self._steps.append((seconds, outside_s, samples))
        number = len(self._steps)
        prediction = plan.prediction
        if self.history is None or prediction is None or number not in _WRITTEN_AFTER:
            return
        steady = self._steps[_WARM_UP_STEPS:]
        usual = mode(size for *_, size in steady)  # the last batch of an epoch may be shorter
        timed, outside = zip(*((taken, out) for taken, out, size in steady if size == usual), strict=True)
        found = past_run(
            plan,
            median(timed),
            outside_s=median(outside),
            steps=len(timed),
            samples=usual,
            ranks_per_node=self.ranks_per_node,
            measured_bytes=memory_bytes,
            run=self._run,
        )
        self._run = found.run
        self.history.append(found)


def past_run(
    plan: Plan,
    step_s: float,
    *,
    steps: int,
    samples: int,
    ranks_per_node: int,
    outside_s: float = 0.0,
    measured_bytes: int = 0,
    run: str = "",
) -> PastRun:
    """Describes a run for the history of its model.

    Args:
        plan: that it followed, with a prediction.
        step_s: seconds of a step.
        steps: that were timed.
        samples: of a step of one replica.
        ranks_per_node: of the machines.
        outside_s: seconds of a step in code outside of the model.
        measured_bytes: peak memory of a rank; 0 where it was not measured.
        run: name of the run; empty: a new one.
    """
    prediction = plan.prediction
    assert prediction is not None
    now = datetime.datetime.now(datetime.UTC)
    mesh = Mesh.of(
        world_size=plan.mesh.world_size,
        pipeline=plan.mesh.pipeline,
        data=plan.mesh.data,
        shard=plan.mesh.shard,
        tensor=plan.mesh.tensor,
        context=plan.mesh.context,
        expert=plan.mesh.expert,
    )
    return PastRun(
        run=run or f"{now:%Y%m%dT%H%M%S%f}-{os.getpid()}",
        kind=RunKind.of(mesh, ranks_per_node=ranks_per_node),
        model=plan.model.fingerprint,
        samples=samples,
        predicted_s=prediction.uncorrected_s,
        measured_s=step_s,
        outside_s=outside_s,
        steps=steps,
        predicted_bytes=max((rank.peak_bytes for rank in prediction.memory), default=0),
        measured_bytes=measured_bytes,
        when=f"{now:%Y-%m-%d %H:%M UTC}",
    )
