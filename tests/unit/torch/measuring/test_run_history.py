"""What runs took, in a file."""

import multiprocessing

from shardwright.mesh import Mesh
from shardwright.plan import (
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    StagePrediction,
)
from shardwright.plan.conditions import Conditions, LinkConditions
from shardwright.planner import RunKind
from shardwright.torch.measuring import run_history
from shardwright.torch.measuring.run_history import RunHistory, RunRecorder


def plan_of(step_s, *, correction=1.0, outside_s=0.0):
    link = LinkConditions(latency_s=0.0, bandwidth_Bps=None)
    conditions = Conditions(hosts=(0, 0), intra_node=link, inter_node=link, outside_s=outside_s)
    return Plan(
        model=ModelIdentity(fingerprint="f", num_parameters=1, units=("a",)),
        mesh=MeshPlan(pipeline=2),
        schedule=SchedulePlan(kind="1f1b", microbatches=1),
        stages=(StagePlan(rank=0, units=("a",)), StagePlan(rank=1, units=())),
        prediction=Prediction(
            step_s=step_s,
            bubble=0.0,
            stages=(StagePrediction(forward_s=1.0, backward_s=1.0),) * 2,
            memory=(
                MemoryPrediction(
                    parameters_bytes=1, gradients_bytes=1, optimizer_bytes=2, activations_bytes=1
                ),
            ),
            provenance="measured",
            correction=correction,
            conditions=conditions,
        ),
    )


def recorded(folder, *, steps, seconds=0.2):
    history = RunHistory(folder, "machine")
    recorder = RunRecorder(history, 2)
    plan = plan_of(0.1)
    for number in range(steps):
        recorder.step_done(9.0 if number < 2 else seconds, plan, samples=8, memory_bytes=7)
    return history.read()


def test_a_run_is_written_once_it_has_gone_on_for_a_while(tmp_path):
    assert recorded(tmp_path, steps=7) == []
    (run,) = recorded(tmp_path, steps=8)
    assert (run.predicted_s, run.measured_s, run.steps) == (0.1, 0.2, 6)
    assert run.kind == RunKind.of(Mesh.of(world_size=2, pipeline=2), ranks_per_node=2)
    assert (run.predicted_bytes, run.measured_bytes) == (5, 7)


def test_a_short_batch_at_the_end_of_an_epoch_does_not_count(tmp_path):
    history = RunHistory(tmp_path, "machine")
    recorder = RunRecorder(history, 2)
    for number in range(8):
        short = number == 7
        recorder.step_done(0.05 if short else 0.2, plan_of(0.1), samples=3 if short else 8, memory_bytes=7)
    (run,) = history.read()
    assert (run.samples, run.steps, run.measured_s) == (8, 5, 0.2)


def add_runs(folder, count):
    for _ in range(count):
        recorder = RunRecorder(RunHistory(folder, "machine"), 2)
        for _ in range(8):
            recorder.step_done(0.2, plan_of(0.1), samples=8, memory_bytes=7)


def test_no_line_is_lost_while_another_run_shortens_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run_history, "_MOST_LINES", 60)
    monkeypatch.setattr(run_history, "_KEPT_LINES", 59)
    processes = multiprocessing.get_context("fork")
    writers = [processes.Process(target=add_runs, args=(tmp_path, 40)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # Whenever there were more than 60, 59 stayed: between 59 and 60 at the end, if none was lost.
    assert len(RunHistory(tmp_path, "machine").read()) in (59, 60)


def test_a_longer_run_is_written_again_under_the_same_name(tmp_path):
    first, second = recorded(tmp_path, steps=40)
    assert first.run == second.run
    assert second.steps == 38


def test_predictions_are_kept_as_they_were_before_their_correction(tmp_path):
    history = RunHistory(tmp_path, "machine")
    recorder = RunRecorder(history, 2)
    for _ in range(8):
        plan = plan_of(0.35, correction=1.5, outside_s=0.05)
        recorder.step_done(0.2, plan, samples=8, memory_bytes=1, outside_s=0.06)
    (run,) = history.read()
    assert abs(run.predicted_s - 0.2) < 1e-12
    assert run.outside_s == 0.06


def test_torn_and_foreign_lines_are_left_out(tmp_path):
    recorded(tmp_path, steps=8)
    file = tmp_path / "runs" / "machine.jsonl"
    good = file.read_text()
    file.write_text(f'{good}{good[:40]}\n[]\nnull\n{{"version": 99}}\n{good}')
    assert len(RunHistory(tmp_path, "machine").read()) == 2


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert recorded(tmp_path, steps=8) == []


def test_old_lines_go(tmp_path):
    (run,) = recorded(tmp_path, steps=8)
    file = tmp_path / "runs" / "machine.jsonl"
    file.write_text(file.read_text() * 2000)
    RunHistory(tmp_path, "machine").append(run)
    assert len(RunHistory(tmp_path, "machine").read()) == 1000
