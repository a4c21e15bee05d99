"""Run folders as a run leaves them, made without running."""

from pathlib import Path

from observe.plans import measured_as
from shardwright.observe import MetricsLog, RunFolder, StepRecord
from shardwright.observe.recorded_steps import RankMemoryAfter, RecordedStep, StepsFile
from shardwright.plan import Plan
from shardwright.planner.replay import base_setting, play

HOLDS = """
import sys, pathlib
from shardwright.observe import RunFolder
RunFolder(pathlib.Path(sys.argv[1])).hold("metrics")
print("holds", flush=True)
sys.stdin.read()
"""
"""A process that writes a part of a run folder, and says so."""


def run_folder(
    path: Path,
    plan: Plan | None,
    *,
    steps: int = 3,
    bytes_in_use: int = 0,
    state_bytes: int = 0,
) -> Path:
    """A run that measured what its plan predicts, 10 % slower."""
    (path / "logs").mkdir(parents=True)
    if plan is not None:
        plan.write(path / "plan.json")
    log = MetricsLog(path / "metrics.jsonl", world_size=1)
    step_s = plan.prediction.step_s if plan is not None and plan.prediction is not None else 1.0
    world = plan.mesh.grid.world_size if plan is not None else 1
    for step in range(1, steps + 1):
        log.append(
            StepRecord(
                step=step,
                seconds=1.1 * step_s,
                update_s=0.02 if step > 1 else None,
                samples=4,
                tokens=400,
                work_s=1.5 * step_s,
                bubble_measured=0.1,
                loss=5.0 / step,
                memory_bytes=tuple(4000 + rank for rank in range(world)),
                memory_limit_bytes=9000,
            )
        )
    log.close()
    if plan is None or plan.prediction is None:
        return path
    simulated = play(base_setting(plan)).simulation
    events = [event._replace(bytes_in_use=bytes_in_use) for event in measured_as(simulated)]
    memory = [RankMemoryAfter(state_bytes, 1700)] * plan.mesh.pipeline if state_bytes else ()
    file = StepsFile(RunFolder(path))
    for step in range(1, steps + 1):
        file.add(RecordedStep.of(step, 1.1 * step_s, events, memory))
    return path
