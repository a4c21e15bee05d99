"""Measures what becomes of a run when a rank dies, hangs or is alone: who is named, and how soon it is back.

    python benchmarks/faults.py                    # each fault 10 times, on 2 and 4 ranks: hours
    python benchmarks/faults.py --quick            # twice, on 2 ranks
    python benchmarks/faults.py --random 200       # faults by chance: is the right rank named?
    python benchmarks/faults.py --soak 30          # minutes; then: equal to an undisturbed run, bit by bit?

A  each kind of fault with each layout, in runs with restarts from checkpoints (every 10 steps). Seconds from
   the fault to: the first line with the right rank; the end of the last process; the first step after.
B  the same faults with DDP under torchrun, and torch.distributed.checkpoint
C  processor time of the threads with which ranks watch each other, as a share of the time

Waits end after `--timeout` seconds, with us and with torch (whose default is 30 minutes).
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from check import Check, lines
from machine import circumstances
from sections import parser_for
from shardwright.checkpoint.folder import CheckpointFolder

SCRIPT = Path(__file__).with_name("faults_train.py")
LAYOUTS = ("pipeline", "replicas", "shards", "tensor")
KINDS = {
    "kill": "backward",
    "exit": "forward",
    "raise": "forward",
    "stop": "update",
    "gil": "forward",
    "spin": "backward",
    "lone_collective": "update",
}
"""Faults, and the phase in which they come."""

_HARMLESS = ("pause", "slow")
_PAUSE_S = 0.02
_NAMED = re.compile(
    r"rank (\d+) (?:has been at|has not run Python|hangs|failed first|ended early|waits in torch\.)"
)
_HEADLINE = re.compile(
    r"^rank (\d+) (?:failed first,|hangs: rank|ended early)"
    r"|failed \(exitcode: .*?\) local_rank: (\d+)"  # torchrun's
)


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a fault; None: it did not come.

    Attributes:
        named: the rank in the headline of the report.
        others: ranks that a line before has named, and that were innocent.
        start_s: that the first start took, from the script's first line behind its imports to its first step.
    """

    layout: str
    ranks: int
    kind: str
    rank: int
    phase: str
    named: int | None
    others: tuple[int, ...]
    named_s: float | None
    ended_s: float | None
    back_s: float | None
    lost_steps: int | None
    start_s: float | None

    @property
    def right(self) -> bool:
        """Whether the rank at fault was named, and no other."""
        return self.named == self.rank and not self.others


@dataclass(slots=True)
class Run:
    """A run in a folder of its own, and what it says, with the time of each line."""

    folder: Path
    said: list[tuple[float, str]] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    process: "subprocess.Popen[str] | None" = None

    def start(self, command: Sequence[str], **variables: str) -> None:
        """Starts it, and listens."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is left: torchrun leaves ranks behind that do not end by themselves."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        time.sleep(1)  # ranks of ours end with their launcher
        for file in self.folder.glob("pid*"):
            if _lives(pid := int(file.name[3:])) and str(self.folder) in _command(pid):
                os.kill(pid, signal.SIGKILL)

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append((time.time(), line.rstrip()))

    def look(self) -> bool:
        """Notes which processes of ranks have ended; whether the run goes on."""
        for file in self.folder.glob("pid*"):
            pid = int(file.name[3:])
            if pid not in self.ends and not _lives(pid):
                self.ends[pid] = time.time()
        assert self.process is not None
        return self.process.poll() is None

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None where it did not end in time, and was killed."""
        end_s = time.monotonic() + limit_s
        while self.look() and time.monotonic() < end_s:
            time.sleep(0.02)
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            return None
        time.sleep(0.1)
        self.look()
        return self.process.returncode

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The notes of the first rank."""
        return _lines(self.folder / "steps.jsonl")

    @property
    def faults(self) -> list[dict[str, Any]]:
        """What has happened."""
        places = ("faults.jsonl", "runs/run/faults.jsonl")  # of stock runs, and of ours
        return [note for place in places for note in _lines(self.folder / place)]

    def found(self, layout: str, ranks: int) -> list[Found]:
        """What became of each fault."""
        faults = [fault for fault in self.faults if fault["kind"] not in _HARMLESS]
        until = [fault["at_s"] for fault in faults[1:]] + [float("inf")]
        return [self._of(fault, end_s, layout, ranks) for fault, end_s in zip(faults, until, strict=True)]

    def _of(self, fault: dict[str, Any], until_s: float, layout: str, ranks: int) -> Found:
        at_s, rank, steps = fault["at_s"], fault["rank"], self.steps
        said = [(now_s - at_s, line) for now_s, line in self.said if at_s <= now_s < until_s]
        heads = [found for _, line in said if (found := _HEADLINE.search(line))]
        named = [(now_s, int(found[1])) for now_s, line in said if (found := _NAMED.search(line))]
        named += [(now_s, int(it[2])) for now_s, line in said if (it := _HEADLINE.search(line)) and it[2]]
        before = [note for note in steps if note["at_s"] <= at_s]
        pids = {note["pid"] for note in before}
        after = [note for note in steps if at_s < note["at_s"] < until_s and note["pid"] not in pids]
        began = [int(file.name[3:]) for file in self.folder.glob("pid*") if file.stat().st_mtime < at_s]
        ends = [self.ends[pid] - at_s for pid in began if pid in self.ends and self.ends[pid] > at_s]
        return Found(
            layout,
            ranks,
            fault["kind"],
            rank,
            fault.get("phase", "forward"),
            named=int(heads[0][1] or heads[0][2]) if heads else None,
            others=tuple({other for now_s, other in named if other != rank}) if layout != "stock" else (),
            named_s=min((now_s for now_s, other in named if other == rank), default=None),
            ended_s=max(ends, default=None),
            back_s=after[0]["at_s"] - at_s if after else None,
            lost_steps=before[-1]["step"] - after[0]["step"] + 1 if after and before else None,
            start_s=steps[0]["at_s"] - steps[0]["began_s"] if steps else None,
        )


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def ours(
    run: Run,
    layout: str,
    ranks: int,
    steps: int,
    chaos: dict[str, Any] | None,
    *,
    timeout_s: float,
    pause_s: float,
) -> None:
    """Starts a run of ours."""
    words = ["shardwright", "run", "-n", str(ranks), "--max-restarts", "100000", "--name", "run"]
    if chaos is not None:
        (run.folder / "chaos.json").write_text(json.dumps(chaos))
        words += ["--chaos", "chaos.json"]
    run.start([*words, str(SCRIPT), layout, str(steps), str(pause_s), str(timeout_s), str(run.folder)])


# ---- A and B ----


def each_fault(layout: str, ranks: int, turn: int, options: argparse.Namespace) -> list[Found]:
    """All kinds of faults in one run, one after the other, on ranks in turn."""
    faults = [
        {"kind": kind, "rank": (turn + number) % ranks, "step": 15 + 10 * number, "phase": phase}
        for number, (kind, phase) in enumerate(KINDS.items())
    ]
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        chaos = {"faults": faults}
        ours(run, layout, ranks, 25 + 10 * len(KINDS), chaos, timeout_s=options.timeout, pause_s=_PAUSE_S)
        code = run.wait(60 * len(KINDS) + len(KINDS) * options.timeout)
        if code != 0:
            print(f"{layout}, {ranks} ranks: exit {code}\n" + "\n".join(line for _, line in run.said[-60:]))
        return _kept(run, run.found(layout, ranks), options)


def stock(kind: str, turn: int, options: argparse.Namespace) -> list[Found]:
    """One fault with PyTorch alone, on 2 ranks."""
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        words = ["stock", "40", str(_PAUSE_S), str(options.timeout), folder]
        run.start([*command, str(SCRIPT), *words], FAULT=f"{kind},{turn % 2},15")
        run.wait(150 + options.timeout)
        return run.found("stock", 2)


def _kept(run: Run, found: list[Found], options: argparse.Namespace) -> list[Found]:
    """Leaves what a run said where somebody was wrongly named."""
    wrong = [each for each in found if not each.right]
    if wrong and options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{now_s:.2f} {line}" for now_s, line in run.said)
        faults = "\n".join(map(json.dumps, run.faults))
        path = options.logs / f"{wrong[0].layout}-{wrong[0].ranks}-{time.time():.0f}.txt"
        path.write_text(f"{wrong}\n{faults}\n{text}\n")
    return found


def table(found: Sequence[Found]) -> Iterator[str]:
    """A line for each kind of fault, and layout."""
    yield f"{'':<10}{'ranks':<6}{'fault':<17}{'named rightly':<15}{'named':<15}{'ended':<15}{'back':<15}lost"
    groups: dict[tuple[str, int, str], list[Found]] = {}
    for each in found:
        groups.setdefault((each.layout, each.ranks, each.kind), []).append(each)
    for (layout, ranks, kind), group in groups.items():
        right = f"{sum(each.right for each in group)} of {len(group)}"
        columns = [
            _seconds([getattr(each, name) for each in group]) for name in ("named_s", "ended_s", "back_s")
        ]
        lost = max((each.lost_steps for each in group if each.lost_steps is not None), default="-")
        yield f"{layout:<10}{ranks:<6}{kind:<17}{right:<15}{''.join(f'{each:<15}' for each in columns)}{lost}"
    starts = sorted({each.start_s for each in found if each.start_s is not None})
    if starts:
        yield f"a first start, from the script's imports to its first step: {statistics.median(starts):.1f} s"


def _seconds(values: Sequence[float | None]) -> str:
    """Median and worst."""
    there = [value for value in values if value is not None]
    missing = f" ({len(values) - len(there)} not)" if there and len(there) < len(values) else ""
    return f"{statistics.median(there):.1f}, {max(there):.1f} s{missing}" if there else "not"


# ---- C ----


def watching(layout: str, ranks: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step, and the share of the time that threads take which watch."""
    steps = 500
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        ours(run, layout, ranks, steps, None, timeout_s=options.timeout, pause_s=0)
        run.wait(300)
        took = json.loads(Path(folder, "watch.json").read_text())
        return took["took_s"] / steps, took["watch_s"] / took["took_s"]


# ---- faults by chance ----


def by_chance(number: int, options: argparse.Namespace) -> list[Found]:
    """So many faults, over all layouts on 2 and 4 ranks."""
    courses = [(layout, ranks) for ranks in options.ranks for layout in options.layouts]
    found: list[Found] = []
    for place, (layout, ranks) in enumerate(courses):
        most = number // len(courses) + (place < number % len(courses))
        seed = options.seed + place
        chaos = {"random": {"seed": seed, "every_s": 4, "most": most, "kinds": [*KINDS, "pause"]}}
        with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
            while len(run.faults) < most:  # a run that has failed twice in the same way starts anew
                before = len(run.faults)
                ours(run, layout, ranks, 10**6, chaos, timeout_s=options.timeout, pause_s=_PAUSE_S)
                while run.look() and not _is_back(run, most):
                    time.sleep(0.02)
                assert run.process is not None
                run.process.send_signal(signal.SIGTERM)
                code = run.wait(60)
                if len(run.faults) == before:
                    print(
                        f"{layout}, {ranks} ranks: exit {code}\n" + "\n".join(it for _, it in run.said[-60:])
                    )
                    break
            found += _kept(run, run.found(layout, ranks), options)
            wrong = sum(not each.right for each in found)
            print(f"{layout}, {ranks} ranks: {len(run.faults)} faults; wrong so far: {wrong}", flush=True)
    return found


def _is_back(run: Run, most: int) -> bool:
    """Whether all faults have come, and steps after the last one."""
    faults, steps = run.faults, run.steps
    return len(faults) >= most and bool(steps) and steps[-1]["at_s"] > faults[-1]["at_s"] + 3


# ---- the soak ----


def soak(minutes: float, options: argparse.Namespace) -> int:
    """Faults for so long, with restarts; then the same steps undisturbed; 0 if all is equal, bit by bit."""
    chaos = {"random": {"seed": options.seed, "every_s": min(60.0, 4 * minutes), "kinds": [*KINDS, "pause"]}}
    layout, ranks = options.layouts[0], options.ranks[0]
    end_s = time.monotonic() + 60 * minutes
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as quiet,
        Run(Path(folder)) as run,
        Run(Path(quiet)) as other,
    ):
        code = None
        while code != 75 and time.monotonic() < end_s + 120:
            ours(run, layout, ranks, 10**6, chaos, timeout_s=options.timeout, pause_s=_PAUSE_S)
            while run.look() and time.monotonic() < end_s:
                time.sleep(0.1)
            assert run.process is not None
            run.process.send_signal(signal.SIGTERM)
            code = run.wait(120)
        found = _kept(run, run.found(layout, ranks), options)
        last = CheckpointFolder(run.folder / "runs/run/checkpoints").commits()[-1].step
        ours(other, layout, ranks, last, None, timeout_s=options.timeout, pause_s=0)
        assert other.wait(60 * minutes + 300) == 0, other.said[-20:]
        losses = [{note["step"]: note["loss"] for note in each.steps} for each in (run, other)]
        unlike = [step for step in range(1, last + 1) if losses[0].get(step) != losses[1].get(step)]
        repeated = {}
        for note in run.steps:
            repeated.setdefault(note["step"], set()).add(note["loss"])
        unlike += [step for step, all_losses in repeated.items() if len(all_losses) > 1]
        tensors = [_tensors(each.folder / "runs/run/checkpoints", last) for each in (run, other)]
        wrong = sum(not each.right for each in found)
        print("\n".join(table(found)))
        print(
            f"{layout}, {ranks} ranks, {minutes:g} minutes: {len(run.faults)} faults, {wrong} wrong names, "
            f"{last} steps; losses that differ from an undisturbed run: {len(unlike)}; tensors equal: "
            f"{tensors[0] == tensors[1]}"
        )
        return 0 if not unlike and tensors[0] == tensors[1] else 1


def _tensors(folder: Path, step: int) -> dict[str, list[tuple[str, str]]]:
    """Checksums of all tensors of a checkpoint, of optimizers and generators, too: ranks share them anew."""
    name = next(commit.name for commit in CheckpointFolder(folder).commits() if commit.step == step)
    saved = CheckpointFolder(folder).open(name)
    return {
        tensor: sorted((str(it.target), sha256(it.stored.data).hexdigest()) for it in saved.whole(tensor))
        for tensor in saved.index.tensors
    }


def main() -> int:
    """Runs what is asked for."""
    parser = parser_for(__doc__, quick="each fault twice, on 2 ranks")
    parser.add_argument("--random", type=int, metavar="N", help="so many faults by chance, alone")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="faults by chance for so long, alone")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--repeats", type=int, help="of each fault; default: 10, with --quick 2")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="S", help="the setting timeout_s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps what runs with wrong names said")
    options = parser.parse_args()
    where = circumstances()
    print("\n".join(f"{key}: {value}" for key, value in where.items()), flush=True)
    if options.soak is not None:
        return soak(options.soak, options)
    checks: list[Check] = []
    shares: dict[str, tuple[float, float]] = {}
    if options.random is not None:
        found = by_chance(options.random, options)
    else:
        if options.quick:
            options.ranks = options.ranks[:1]
        repeats = options.repeats or (2 if options.quick else 10)
        found = []
        for ranks in options.ranks:
            for layout in options.layouts:
                shares[f"{layout}, {ranks} ranks"] = watching(layout, ranks, options)
                for turn in range(repeats):
                    found += each_fault(layout, ranks, turn, options)
                    print(f"{layout}, {ranks} ranks: {turn + 1} of {repeats}", flush=True)
        for kind in KINDS:
            for turn in range(repeats):
                found += stock(kind, turn, options)
        checks.append(_check("watching, of the time", max(share for _, share in shares.values()), 0.001))
    of_ours = [each for each in found if each.layout != "stock"]
    checks.append(_check("wrong names", sum(not each.right for each in of_ours), 0))
    for kinds, target in (("kill", "exit", "raise"), 1.0), (("stop",), 5.0):
        named = [each.named_s or float("inf") for each in of_ours if each.kind in kinds]
        if named:
            checks.append(_check(f"named after {', '.join(kinds)}, worst (s)", max(named), target))
    print("\n".join(table(found)))
    for name, (step_s, share) in shares.items():
        print(f"watching, {name}: {share:.2%} of the time, {step_s * share * 1e6:.0f} us a step")
    print("\n".join(lines(checks)))
    if options.json is not None:
        document = {"circumstances": where, "found": [asdict(each) for each in found], "watching": shares}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and not all(check.passes for check in checks) else 0


def _check(what: str, value: float, target: float) -> Check:
    return Check(section="F", what=what, value=value, target=target)


if __name__ == "__main__":
    sys.exit(main())
