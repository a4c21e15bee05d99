"""What saving costs: how long training stands still, until the checkpoint is there, and what resuming takes.

    python benchmarks/checkpoints.py [--quick] [--folder DIR]

Two replicas on gloo train one model; Shardwright, and PyTorch's `torch.distributed.checkpoint` (DCP) with
`DistributedDataParallel`, in turns on the same machine. DCP has no checksums and no atomic commit. CPU time
is that of both ranks: it says more than seconds where others use the machine, and nothing of the disk.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from machine import circumstances
from shardwright.testing import run_ranks

_RANKS = 2
_SIDES = ("shardwright", "shardwright, waiting", "dcp.async_save", "dcp.save", "torch.save by rank 0")


def _model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))


def _ours(folder: Path, width: int, saves: int, *, asynchronous: bool) -> dict[str, Any]:
    import shardwright.torch as sw

    sw.init({"run_dir": "off", "pipeline_parallel_degree": 1})
    torch.manual_seed(0)
    model = sw.DistributedModel(_model(width))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    checkpoints = sw.Checkpoints(folder, keep=None, asynchronous=asynchronous)

    @sw.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def step() -> None:
        optimizer.zero_grad()
        train(model, torch.ones(16, width))
        optimizer.step()

    step()
    stalls, totals, looks, steps, cpu = [], [], [], [], []
    for number in range(1, saves + 1):
        begin_s = time.perf_counter()
        step()
        steps.append(time.perf_counter() - begin_s)
        sw.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        checkpoints.save(number)
        stalls.append(time.perf_counter() - begin_s)
        cpu.append(time.process_time() - begin_cpu_s)
        while checkpoints._saves._under_way is not None:
            step()
            before_s = time.perf_counter()
            checkpoints.step_done(number)
            looks.append(time.perf_counter() - before_s)
        totals.append(time.perf_counter() - begin_s)
    sw.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    checkpoints.resume()
    resumed = {"resume": time.perf_counter() - begin_s, "resume_cpu": time.process_time() - begin_cpu_s}
    return {"stall": stalls, "total": totals, "save_cpu": cpu, **resumed, "look": looks, "step": steps}


def _peer(folder: Path, width: int, saves: int, kind: str) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import shardwright.torch as sw

    sw.init({"run_dir": "off"})
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(_model(width))
    optimizer = torch.optim.AdamW(model.parameters())
    apart = dist.new_group(backend="gloo")  # its thread makes collectives while steps go on

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(16, width)).square().mean().backward()
        optimizer.step()

    def save(path: Path) -> Any:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        if kind == "dcp.async_save":
            return dcp.async_save(state, checkpoint_id=path, process_group=apart)
        if kind == "dcp.save":
            dcp.save(state, checkpoint_id=path)
        elif dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()
        return None

    step()
    stalls, totals, cpu = [], [], []
    for number in range(1, saves + 1):
        step()
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        future = save(folder / f"{kind.replace(' ', '-')}-{number}")
        stalls.append(time.perf_counter() - begin_s)
        cpu.append(time.process_time() - begin_cpu_s)
        while future is not None:
            step()
            done = torch.tensor(float(future.done()))
            dist.all_reduce(done)
            if done.item() == dist.get_world_size():
                break
        totals.append(time.perf_counter() - begin_s)
    optimizer = torch.optim.AdamW(model.parameters())  # without a state, as in a new process
    optimizer.zero_grad()
    dist.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if kind == "torch.save by rank 0":
        found = torch.load(folder / f"{kind.replace(' ', '-')}-{saves}", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    else:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"{kind}-{saves}")
    resumed = {"resume": time.perf_counter() - begin_s, "resume_cpu": time.process_time() - begin_cpu_s}
    return {"stall": stalls, "total": totals, "save_cpu": cpu, **resumed, "look": [], "step": []}


def _once(side: str, folder: Path, width: int, saves: int) -> dict[str, Any]:
    if side.startswith("shardwright"):
        later = side == "shardwright"
        ranks = run_ranks(_ours, _RANKS, folder, width, saves, asynchronous=later, timeout_s=300)
    else:
        ranks = run_ranks(_peer, _RANKS, folder, width, saves, side, timeout_s=300)
    return {
        "stall": [max(each) for each in zip(*(rank["stall"] for rank in ranks), strict=True)],
        "total": [max(each) for each in zip(*(rank["total"] for rank in ranks), strict=True)],
        "save_cpu": [sum(each) for each in zip(*(rank["save_cpu"] for rank in ranks), strict=True)],
        "resume": [max(rank["resume"] for rank in ranks)],
        "resume_cpu": [sum(rank["resume_cpu"] for rank in ranks)],
        "look": ranks[0]["look"],
        "step": ranks[0]["step"],
    }


def main() -> None:
    """Prints a table, medians with the smallest and the largest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    options = parser.parse_args()
    width, saves, rounds = (256, 2, 1) if options.quick else (1024, 4, 5)
    megabytes = 3 * 4 * sum(p.numel() for p in _model(width).parameters()) / 1e6
    found: dict[str, dict[str, list[float]]] = {side: {} for side in _SIDES}
    for _ in range(rounds):
        for side in _SIDES:
            folder = Path(tempfile.mkdtemp(dir=options.folder))
            try:
                for name, values in _once(side, folder, width, saves).items():
                    found[side].setdefault(name, []).extend(values)
            finally:
                shutil.rmtree(folder)
    print(*(f"{name}: {value}" for name, value in circumstances().items()), sep="\n")
    print(f"\n{megabytes:.0f} MB of model and AdamW's state, {_RANKS} replicas, milliseconds\n")
    columns = ("stall", "total", "resume", "save_cpu", "resume_cpu")
    print("| side | training stands still | until it is there | resuming | CPU of the call | of resuming |")
    print("|" + " --- |" * (1 + len(columns)))
    for side, values in found.items():
        print(f"| {side} | {' | '.join(_cell(values[name]) for name in columns)} |")
    ours = found["shardwright"]
    print(f"\nstep_done() while a save is written: {_cell(ours['look'])}; a step: {_cell(ours['step'])}")
    for kind, ratio in _of_dcp(found).items():
        print(f"{kind}: {ratio:.2f} of DCP's time (target 1.00)")


def _of_dcp(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Medians of waiting saves and of resuming, as parts of those of `dcp.save`."""
    ours, theirs = found["shardwright, waiting"], found["dcp.save"]
    return {
        what: statistics.median(ours[name]) / statistics.median(theirs[name])
        for what, name in (
            ("a save that waits", "stall"),
            ("its CPU time", "save_cpu"),
            ("resuming", "resume"),
            ("its CPU time there", "resume_cpu"),
        )
    }


def _cell(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.3g} ({low * 1e3:.3g} .. {high * 1e3:.3g})"


if __name__ == "__main__":
    main()
