"""PyTorch's CSV form, read and written, and PyTorch's own opinion of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Edge,
    Kind,
    build_schedule,
    format_torch_csv,
    lower,
    parse_torch_csv,
    place_stages,
    read_torch_csv,
    validate,
    write_torch_csv,
)

from .cases import ODD_PLACEMENTS, text_of

CASES = [(kind, place_stages(kind, num_ranks=p)) for kind in KINDS for p in (2, 4)]
CASES += [(kind, placement) for kind in KINDS for placement in ODD_PLACEMENTS]


@pytest.mark.parametrize(("kind", "stage_ranks"), CASES)
def test_round_trip(kind, stage_ranks, tmp_path):
    compute = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=5)
    forwards = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=5, forward_only=True)
    path = tmp_path / "schedule.csv"
    for schedule in (compute, lower(compute), lower(forwards)):
        write_torch_csv(schedule, path)
        again = read_torch_csv(path)
        assert (again.actions, again.stage_ranks) == (schedule.actions, schedule.stage_ranks)
        assert again.num_microbatches == 5
        assert again.kind == str(path)
        validate(again)


def test_the_form():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2)
    assert format_torch_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert format_torch_csv(lower(schedule)).startswith("0RECV_B0,0F0,0SEND_F0,0RECV_B1,0F1,")


def test_bubbles_blanks_and_what_is_torchs_own_are_dropped():
    text = "0UNSHARD, 0F0 ,,0F1,,0B0,0B1,0REDUCE_GRAD,0RESHARD,\r\n1UNSHARD,1F0,1B0,,1F1,1B1\r\n\r\n"
    schedule = parse_torch_csv(text)
    assert text_of(schedule) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    validate(schedule)


def test_overlapped_pairs_are_read_in_order():
    schedule = parse_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,( 0F2 ; 0I1 )OVERLAP_F_B,0W1,0B2")
    assert text_of(schedule) == ["0F0 0F1 0B0 0F2 0I1 0W1 0B2"]


def test_transfers_find_their_peers():
    row = parse_torch_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0").actions
    assert [action.peer for action in row[0]] == [None, 1, 1, None]
    assert [action.peer for action in row[1]] == [0, None, None, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no action of stage 0"),
        ("0F0,0X1", r"test.csv, row 1 \(rank 0\), column 2: '0X1' is no action. Write stage, kind"),
        ("0F0\n1F0,1F", r"row 2 \(rank 1\), column 2: '1F' is no action"),
        ("0F0\n1F0,1SEND_F0x", "'1SEND_F0x' is no action"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B", r"column 2: '0Q0' is no action"),
        ("0F0,(0F1;0B0)OVERLAP", "is no action"),
        ("0F0\n0F1", r"row 2 \(rank 1\), column 1: 0F1 belongs to stage 0, which row 1 runs already"),
        ("0F0\n\n1F0", r"row 2 \(rank 1\) has no action"),
        ("0F0\n,,\n1F0", r"row 2 \(rank 1\) has no action"),
        ("0F0\n2F0", "has no action of stage 1. Number the stages 0, 1, ..."),
        ("0F" + "9" * 5000, "is no action"),
        ('"' + "0" * 200_000, "is no CSV"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text, words):
    with pytest.raises(ScheduleError, match=words):
        parse_torch_csv(text, source="test.csv")


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="0123FBIWSEND_RCV;(),\n\r\"'OVLAP \x00é", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        schedule = parse_torch_csv(text)
    except ScheduleError:
        return
    assert parse_torch_csv(format_torch_csv(schedule)).actions == schedule.actions


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_torch_csv(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="is no UTF-8 text"):
        read_torch_csv(binary)


def test_transfers_that_skip_stages_cannot_be_written():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1, 2), num_microbatches=1)
    lowered = lower(schedule, [Edge(0, 1), Edge(1, 2), Edge(0, 2)])
    with pytest.raises(ScheduleError, match="PyTorch's CSV knows transfers between neighbours only"):
        format_torch_csv(lowered)


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_rows(torch_schedules, text):
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }


@pytest.mark.parametrize(("kind", "stage_ranks"), CASES)
def test_torch_accepts_our_compute_and_we_accept_its_lowering(torch_schedules, kind, stage_ranks):
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=4)
    rows = torch_rows(torch_schedules, format_torch_csv(schedule))
    assert [[str(action) for action in row] for row in rows.values()] == [
        [str(action) for action in row] for row in schedule.actions
    ]
    mapping = torch_schedules._validate_schedule(rows, schedule.num_ranks, schedule.num_stages, 4)
    assert tuple(mapping[stage] for stage in range(schedule.num_stages)) == schedule.stage_ranks

    with_transfers = torch_schedules._add_send_recv(rows, lambda s: stage_ranks[s], schedule.num_stages)
    torch_schedules._simulate_comms_compute(with_transfers, lambda s: stage_ranks[s], schedule.num_stages)
    text = "\n".join(",".join(map(str, row)) for row in with_transfers.values())
    lowered_by_torch = parse_torch_csv(text)
    validate(lowered_by_torch)
    assert lowered_by_torch.stage_ranks == schedule.stage_ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torchs_runtime_loads_our_files(torch_schedules, kind, form, tmp_path):
    stage_ranks = place_stages(kind, num_ranks=2)
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=4)
    if form == "compute_comms":
        schedule = lower(schedule)
    path = tmp_path / "schedule.csv"
    write_torch_csv(schedule, path)

    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)  # stages would need process groups
    runtime.pipeline_order = {}
    runtime.pp_group_size = schedule.num_ranks
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    runtime._stages = []
    runtime._defer_pp_recv = False
    runtime._load_csv(str(path), format=form)

    def compute(rows):
        return [
            [str(action) for action in row if str(action.computation_type.value) in ("F", "B", "I", "W")]
            for row in rows
        ]

    ours = [[str(action) for action in row if action.is_compute] for row in schedule.actions]
    assert compute(runtime.pipeline_order_with_comms.values()) == ours


def test_torchs_own_schedules_read_back(torch_schedules):
    """A file with all that PyTorch writes for sharded parameters and with overlapped pairs."""
    overlap = torch_schedules._Action(
        -1,
        torch_schedules._ComputationType.OVERLAP_F_B,
        None,
        (torch_schedules._Action.from_str("0F1"), torch_schedules._Action.from_str("0B0")),
    )
    rows = [torch_schedules._Action.from_str(cell) for cell in ("0UNSHARD", "0F0")] + [overlap]
    rows += [torch_schedules._Action.from_str(cell) for cell in ("0B1", "0REDUCE_GRAD", "0RESHARD")]
    schedule = parse_torch_csv(",".join(map(str, rows)))
    assert text_of(schedule) == ["0F0 0F1 0B0 0B1"]
    assert {action.kind for action in schedule.actions[0]} == {Kind.FORWARD, Kind.BACKWARD}
    validate(schedule)
