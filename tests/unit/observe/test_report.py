"""The report: its data, its HTML, what it says of damaged and missing files."""

import gzip
import io
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from planned import planned

from observe.plans import two_stage_plan
from observe.run_folders import run_folder
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.observe import Console, JsonLines, Observer, RunFolder, StepRecord, read_json_lines
from shardwright.observe import observer as report_at_end
from shardwright.observe.report import ReportData, gather, render_page, write_report
from shardwright.observe.report.charts import charts
from shardwright.observe.run_record import RunRecord
from shardwright.observe.summary import totals_of
from shardwright.plan import Plan
from shardwright.quantities import format_seconds


def given(plan: Plan) -> Plan:
    """The plan, with a number of microbatches that the settings gave, and not the planner."""
    return plan.model_copy(update={"pins": {"microbatches": plan.schedule.microbatches}})


def page(data: ReportData) -> str:
    return render_page(data, library="")


def test_a_run_is_compared_with_its_plan(tmp_path: Path) -> None:
    plan = planned(data=2, update_s=0.016)
    assert plan.prediction is not None
    data = gather(run_folder(tmp_path / "run", plan))
    step, update, memory = data.compared
    assert (step.predicted, step.measured) == (plan.prediction.step_s, 1.1 * plan.prediction.step_s)
    assert step.above == pytest.approx(0.1)
    assert (update.predicted, update.measured) == (0.016, 0.02)
    assert update.above == pytest.approx(0.25)
    assert memory.predicted == max(part.peak_bytes for part in plan.prediction.memory)
    assert memory.measured == pytest.approx(4003)
    # Placement DPT: world ranks 0 and 2 are pipeline rank 0 of the two replicas.
    assert data.peak_by_rank == (pytest.approx(4002), pytest.approx(4003))
    # Measured on a clock of whole microseconds.
    assert all(row.above == pytest.approx(0.0, abs=1e-4) for row in data.spent)
    assert [row.predicted for row in data.spent[:2]] == [pytest.approx(0.4004), pytest.approx(0.8004)]
    assert data.predicted is not None
    assert data.predicted.limit_bytes == 10_000
    assert data.timeline is not None
    assert data.timeline.step == 3
    assert data.notes == ()
    assert set(charts(data)) == {"waterfall", "memory", "timeline", "stack", "loss", "steps"}


def test_the_measured_timeline_is_that_of_the_recorded_step(tmp_path: Path) -> None:
    plan = planned(kind="zb_h1")
    data = gather(run_folder(tmp_path / "run", plan))
    assert data.timeline is not None
    assert data.predicted is not None
    predicted = [span for span in data.predicted.spans if span.kind != "send"]
    assert {span.kind for span in predicted} == {"forward", "backward", "input", "weight"}
    assert any(span.kind == "send" for span in data.predicted.spans)
    assert [(s.rank, s.name, s.kind) for s in data.timeline.spans] == [
        (s.rank, s.name, s.kind) for s in predicted
    ]
    for found, expected in zip(data.timeline.spans, predicted, strict=True):
        assert found.start_s == pytest.approx(expected.start_s, abs=1e-6)


def test_measured_memory_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    data = gather(run_folder(tmp_path / "run", planned(kind="zb_h1"), bytes_in_use=10 * 2**20))
    assert data.timeline is not None
    assert list(data.timeline.memory) == [0, 1]
    for rank, moments in data.timeline.memory.items():
        work = [
            span for span in data.timeline.spans if span.rank == rank and span.kind not in ("send", "wait")
        ]
        assert [at_s for at_s, _ in moments] == pytest.approx([span.end_s for span in work], abs=1e-6)
        assert [num_bytes for _, num_bytes in moments] == [10 * 2**20] * len(work)
    curves = charts(data)["memory"]["data"]
    assert [(curve["name"], curve["yaxis"]) for curve in curves] == [
        ("predicted", "y"),
        ("measured", "y"),
        ("predicted", "y2"),
        ("measured", "y2"),
    ]
    assert set(curves[3]["y"]) == {10.0}
    assert [curve["line"]["dash"] for curve in curves[:2]] == ["dash", "solid"]
    bare = gather(run_folder(tmp_path / "bare", planned()))
    assert bare.timeline is not None
    assert bare.timeline.memory == {}


def test_memory_is_compared_without_what_is_not_the_trainings(tmp_path: Path) -> None:
    """Bug: the peak of a whole process, 500 MiB of it Python and libraries, stood beside the prediction."""
    plan = planned(kind="zb_h1", cores=2)
    assert plan.prediction is not None
    data = gather(run_folder(tmp_path / "run", plan, bytes_in_use=5700, state_bytes=1000))
    for row, memory in zip(data.memory, plan.prediction.memory, strict=True):
        # 1700 bytes are in use after a step, 1000 of them are of the training.
        assert row.measured == 5700 - 700
        assert row.predicted == memory.peak_bytes - memory.work_bytes
    peak = data.compared[2]
    assert (peak.predicted, peak.measured, peak.remark) == (data.memory[0].predicted, 5000, "")
    html = page(data)
    assert "The largest process had 3.9 KiB" in html
    curves = charts(data)["memory"]["data"]
    assert set(curves[1]["y"]) == {5000 / 2**20}
    # Of a run that recorded no memory, the two are not compared.
    unknown = gather(run_folder(tmp_path / "unknown", plan)).compared[2]
    assert "whole process" in unknown.remark
    assert unknown.above is None


def test_the_parts_of_a_step_add_up_in_both_columns(tmp_path: Path) -> None:
    """Bug: nothing said which part of a step was slower than predicted."""
    plan = planned(kind="1f1b", ranks=3, slow_stage=1.5, data=2, recompute_s=0.02, crowding=1.25)
    assert plan.prediction is not None
    data = gather(run_folder(tmp_path / "run", plan))
    parts = {part.kind: part for part in data.parts}
    assert list(parts) == ["forward", "backward", "imbalance", "waiting", "around"]
    assert sum(part.predicted or 0 for part in data.parts) == pytest.approx(plan.prediction.step_s)
    assert sum(part.measured or 0 for part in data.parts) == pytest.approx(1.1 * plan.prediction.step_s)
    # What was measured is the plan played out without crowding, and all of the rest came around it.
    for kind in ("forward", "backward", "imbalance", "waiting"):
        assert parts[kind].predicted == pytest.approx(1.25 * (parts[kind].measured or 0), abs=1e-5)
    worst = re.search(r'<tr class="worst"><td class="text" data-label="part">.*?</span>(\w+)', page(data))
    assert worst is not None
    assert worst[1] == "around"
    assert {part.name for part in parts["around"].finer} >= {"sums over replicas"}


def test_the_timeline_is_of_the_most_usual_recorded_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", planned(), steps=5)
    data = gather(folder)
    assert [each.step for each in data.recorded] == [3, 5]
    assert data.timeline is not None
    assert data.timeline.step == 5
    document = json.loads((folder / "steps.json").read_text())
    document["steps"][1]["seconds"] *= 2
    (folder / "steps.json").write_text(json.dumps(document))
    data = gather(folder)
    assert data.timeline is not None
    assert data.timeline.step == 3
    assert data.notes == ()
    assert [name for name in charts(data) if name.startswith("timeline")] == ["timeline", "timeline@5"]
    html = page(data)
    assert 'data-plot="timeline" aria-pressed="true">step 3, ' in html
    assert 'data-plot="timeline@5" aria-pressed="false">step 5, ' in html


def test_the_verdict(tmp_path: Path) -> None:
    plan = planned(data=2)
    assert plan.prediction is not None
    data = gather(run_folder(tmp_path / "run", plan))
    verdict = data.verdict
    assert verdict is not None
    step_s = plan.prediction.step_s
    assert verdict.step_s == pytest.approx(1.1 * step_s)
    assert verdict.rate == pytest.approx(400 / 1.1 / step_s)
    # Two replicas do the work of two pipelines.
    assert verdict.speed_up == pytest.approx(2 * 1.5 / 1.1)
    assert verdict.idle == pytest.approx(0.1)
    assert verdict.slower == pytest.approx(0.1)
    text = str(verdict)
    assert "2.73 times one process, 10% idle, 10% slower than predicted. Next: " in text
    assert 'id="verdict"' in page(data)
    plan.write(tmp_path / "plan.json")
    alone = gather(tmp_path / "plan.json").verdict
    assert alone is not None
    assert str(alone).startswith(f"{format_seconds(step_s)} a step, as predicted, ")


@pytest.mark.parametrize(
    ("plan", "next_step"),
    [
        (given(planned(ranks=4, microbatches=4)), "try 8 microbatches: "),
        (planned(ranks=1, sync_s=0.0), "forward and backward are "),
        (planned(ranks=2, microbatches=64, slow_stage=3.0, message_bytes=0), "imbalance takes "),
    ],
)
def test_what_to_do_next_about_a_plan(tmp_path: Path, plan: Plan, next_step: str) -> None:
    plan.write(tmp_path / "plan.json")
    verdict = gather(tmp_path / "plan.json").verdict
    assert verdict is not None
    assert verdict.next.startswith(next_step), verdict.next


@pytest.mark.parametrize("shared", [{"tensor": 2}, {"shard": 2}])
def test_ranks_that_share_layers_or_parameters_do_not_tell_what_one_process_takes(
    shared: dict[str, int],
) -> None:
    """Bug: "1.93 times one process", of two tensor-parallel ranks that waited for each other."""
    plan = planned(data=2)
    totals = totals_of([StepRecord(step=1, seconds=2.0, samples=8, work_s=3.0)])
    assert totals.speed_up(plan) == 3.0
    assert totals.speed_up(plan.model_copy(update={"mesh": plan.mesh.model_copy(update=shared)})) is None
    assert totals.speed_up(None) is None


def test_what_the_run_was(tmp_path: Path) -> None:
    folder = RunFolder(run_folder(tmp_path / "run", planned()))
    RunRecord(script="train.py", command="shardwright run -n 2 train.py <x>").ended(folder, 0)
    events = JsonLines(folder.events_file)
    facts = {"machine": {"host": "node-1", "cores": "8"}, "versions": {"torch": "2.11.0"}, "commit": "c0ffee"}
    events.append({"kind": "surroundings", **facts})
    events.append({"kind": "model_known", "model": "GPTNeoX"})
    events.close()
    folder.write("config.json", Config.parse({"microbatches": 4, "run_name": "run"}).to_json())
    html = page(gather(folder.path))
    listed = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert listed["command"] == "shardwright run -n 2 train.py &lt;x&gt;"
    assert (listed["host"], listed["cores"], listed["versions"]) == ("node-1", "8", "torch 2.11.0")
    assert (listed["commit"], listed["model"], listed["settings"]) == (
        "c0ffee",
        "GPTNeoX",
        "microbatches = 4",
    )
    assert "GPTNeoX of 1,234 parameters" in html
    assert listed["state"] == "finished"
    # A run writes its report before its launcher writes how it ended: it is not "running".
    RunRecord(script="train.py").ended_as(folder, "running")
    assert "<dt>state</dt>" not in page(gather(folder.path))


def test_a_plan_alone(tmp_path: Path) -> None:
    plan = planned()
    plan.write(tmp_path / "gpt.json")
    data = gather(tmp_path / "gpt.json")
    assert (data.name, data.steps, data.timeline, data.notes) == ("gpt", (), None, ())
    assert set(charts(data)) == {"waterfall", "memory", "timeline", "stack"}
    text = page(data)
    assert plan.prediction is not None
    assert f'data-figure="step_predicted" data-value="{plan.prediction.step_s!r}"' in text
    assert "_measured" not in text  # nothing was: no "unknown", and no remark about it
    assert "Python and its libraries" not in text
    assert "<h2>The plan</h2>" in text
    assert "12.5% slower, with 4.0 KiB" in text
    assert "The times of the units were measured." in text


@pytest.mark.parametrize("steps", [0, 2])
def test_what_a_run_lacks_is_told(tmp_path: Path, steps: int) -> None:
    """Bugs: bad lines were told beside good ones alone, and any such run had "ended in its first step"."""
    folder = run_folder(tmp_path / "run", planned(), steps=steps)
    (folder / "steps.json").unlink(missing_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("garbage\ngarbage\n")
    no_timeline, *no_step, left_out = gather(folder).notes
    assert no_timeline == "No step was recorded, so no timeline was measured."
    assert no_step == ["No step was done, so nothing was measured."] * (steps == 0)
    assert f"line {steps + 1} is no JSON" in left_out


def test_memory_that_is_no_number_is_not_drawn(tmp_path: Path) -> None:
    """Bug: "Out of range float values are not JSON compliant"."""
    folder = run_folder(tmp_path / "run", planned(), steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "memory/peak_by_rank(GiB)": ["NaN", 1e300]}\n')
    assert "rank 1" in page(data := gather(folder))
    assert data.peak_by_rank == (pytest.approx(4000), pytest.approx(4001))


def test_names_from_files_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>{stage}"
    plan = planned(unit=evil)
    plan = plan.model_copy(update={"why": ("<img src=x onerror=alert(2)>",)})
    plan.write(tmp_path / "plan.json")
    text = page(gather(tmp_path / "plan.json"))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;0" in text
    assert len(re.findall("<script", text)) == 4


def test_the_file_holds_the_library_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = run_folder(tmp_path / "run", planned())
    file = write_report(folder, folder / "report.html")
    text = file.read_text()
    match = re.search(r'id="library">([^<]*)<', text)
    assert match is not None
    assert b"Plotly" in gzip.decompress(b64decode(match[1]))
    without = text.replace(match[1], "")
    assert "default-src 'none'" in without
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:)?//""", without) == []
    assert file.stat().st_size < 2_500_000
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


def observed(tmp_path: Path, plan: Plan, **config: Any) -> tuple[RunFolder, str]:
    folder = RunFolder.create(tmp_path, name="run", environ={})
    stream = io.StringIO()
    observer = Observer(
        Config.parse(config),
        rank=0,
        world_size=2,
        pipeline_ranks=(0, 1),
        folder=folder,
        prints=True,
        console=Console(stream=stream, environ={}),
    )
    observer.plan_made(plan)
    observer.step_done(StepRecord(step=1, seconds=0.5, samples=8, loss=2.0))
    observer.close()
    observer.close()
    return folder, stream.getvalue()


def test_a_run_leaves_a_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder, said = observed(tmp_path, two_stage_plan())
    assert folder.report_file.exists()
    assert "no report.html" not in said
    assert [e["kind"] for e in read_json_lines(folder.events_file)][-1] == "report_written"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (UsageError("the disk is full. Name another file."), "the disk is full. Name another file"),
    ],
)
def test_an_error_in_it_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(report_at_end, "find_spec", lambda name: True)
    monkeypatch.setattr("shardwright.observe.report.write_report", fail)
    folder, said = observed(tmp_path, two_stage_plan())
    assert f"no report.html: {reason}. To write it: shardwright report" in said
    last = read_json_lines(folder.events_file)[-1]
    assert (last["kind"], last["reason"]) == ("report_not_written", reason)
