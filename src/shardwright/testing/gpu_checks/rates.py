"""Rates of a GPU and of what lies between GPUs, and steps beside them."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwright.torch as sw
from shardwright.comm.message_names import BACKEND
from shardwright.quantities import format_bytes, format_seconds
from shardwright.run.context import context
from shardwright.run.machine import seconds_of
from shardwright.testing.gpu_checks.training import device_of_rank, gpt, loss_of, running
from shardwright.torch.attention.blockwise import Seen, blockwise_attention
from shardwright.torch.attention.kernels import Attention, attend
from shardwright.torch.counting import compiled_modules
from shardwright.torch.offload.saved_storage import PinnedTier
from shardwright.torch.rank_probe import DTYPES, measure_memory_rates, measure_products

_COPIED_BYTES = 256 * 2**20
_BUS_BYTES = 64 * 2**20


def fastest(call: Callable[[], object], device: torch.device, *, runs: int = 3) -> float:
    """Seconds of the fastest of some runs."""
    return min(seconds_of(call, device, runs=runs))


def products() -> str:
    """Fastest products of matrices, by type."""
    device = device_of_rank()
    told = []
    for dtype in DTYPES:
        rates = measure_products(device, dtype, progress=lambda: None)
        told.append(f"{dtype} {max((rate.alone for rate in rates), default=0.0) / 1e12:.3g}")
    return f"TFLOP/s: {', '.join(told)}"


def memory() -> str:
    """Rates of the device's memory, and of copies between it and the host, from pinned memory and other."""
    device = device_of_rank()
    rates = measure_memory_rates(device)
    text = f"{rates.memory_Bps / 1e9:.0f} GB/s in memory"
    if device.type == "cpu":
        return text
    host = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    there = torch.zeros_like(host, device=device)
    pageable_s = fastest(lambda: there.copy_(host), device)
    return (
        f"{text}; to and from the host {rates.host_Bps / 1e9:.1f} GB/s pinned, "
        f"{_COPIED_BYTES / pageable_s / 1e9:.1f} pageable"
    )


def copies_beside_work() -> str:
    """Offloads bytes while products are computed, brings them back; how much of the copy is hidden."""
    device = device_of_rank()
    tier = PinnedTier(device)
    given = torch.arange(_COPIED_BYTES // 4, device=device, dtype=torch.int32).view(torch.uint8)
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def both(number: int, *, copies: bool = True) -> None:
        written = tier.write(given) if copies else None
        for _ in range(number):
            torch.matmul(square, square)
        if written is not None:
            place, write = written
            write.wait()
            tier.free(place)

    copied_s = fastest(partial(both, 0), device)
    number = max(1, int(copied_s / fastest(partial(both, 1, copies=False), device)))
    worked_s = fastest(partial(both, number, copies=False), device)
    both_s = fastest(partial(both, number), device)
    place, write = tier.write(given)
    write.wait()
    back = torch.zeros_like(given)
    tier.read(place, back).wait()
    tier.close()
    if not torch.equal(given, back):
        raise AssertionError("bytes that were offloaded came back as others")
    hidden = (copied_s + worked_s - both_s) / min(copied_s, worked_s)
    return (
        f"{max(0.0, hidden):.0%} hidden of {format_bytes(_COPIED_BYTES)} copied in {format_seconds(copied_s)}"
    )


def attention() -> str:
    """Compares each kernel that is chosen with scores in full, forward and backward."""
    device, told = device_of_rank(), {}
    cases: list[tuple[str, torch.dtype, Seen, bool]] = [
        *(("causal", dtype, Seen(causal=True), False) for dtype in (torch.float32, torch.bfloat16)),
        ("mask", torch.float32, Seen(), True),
        ("window", torch.bfloat16, Seen(causal=True, window=16), False),
    ]
    for name, dtype, seen, masked in cases:
        torch.manual_seed(0)
        given = [torch.randn(2, 4, 64, 32, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        mask = torch.randn(2, 1, 64, 64, device=device, dtype=dtype) if masked else None
        q, k, v = given
        output, choice = attend(q, k, v, mask, Attention(scale=0.2, seen=seen))
        torch.autograd.backward(output.float().square().sum())
        wide = [each.detach().double().requires_grad_() for each in given]
        keys = torch.arange(64, device=device)
        behind = keys[:, None] - keys
        hidden = (behind < 0) & seen.causal | (behind >= (seen.window or 64))
        scores = wide[0] @ wide[1].transpose(-1, -2) * 0.2 + (0.0 if mask is None else mask.double())
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide[2]
        torch.autograd.backward(expected.square().sum())
        limit = 5e-2 if dtype is torch.bfloat16 else 1e-4
        pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip(given, wide, strict=True))]
        for found, right in pairs:
            assert found is not None
            assert right is not None
            torch.testing.assert_close(found.double(), right, rtol=limit, atol=limit)
        told[f"{name} {str(dtype).removeprefix('torch.')}"] = choice.kernel
    _dropped_alike(device)
    return ", ".join(f"{case}: {kernel}" for case, kernel in told.items())


def _dropped_alike(device: torch.device) -> None:
    """What is dropped in the forward is dropped again in the backward: values count linearly."""
    q, k, v = (torch.randn(1, 2, 64, 16, device=device).requires_grad_() for _ in range(3))
    total = blockwise_attention(q, k, v, scale=0.3, dropout=0.4).sum()
    torch.autograd.backward(total)
    assert v.grad is not None
    torch.testing.assert_close((v.grad * v).sum(), total, rtol=1e-3, atol=1e-3)


def collectives() -> str:
    """Sums, gathers and shares out by the library's own backend, on streams of the device."""
    device = device_of_rank()
    with running():
        group = dist.new_group(backend=BACKEND)
        rank, num = dist.get_rank(), dist.get_world_size()
        given = torch.arange(2**20 * num, device=device, dtype=torch.float32) + rank
        total = given.clone()
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        work.wait()
        everyone = torch.stack([given - rank + each for each in range(num)])
        torch.testing.assert_close(total, everyone.sum(0))
        part = torch.empty(2**20, device=device)
        dist.reduce_scatter_tensor(part, given, group=group)
        torch.testing.assert_close(part, everyone.sum(0).chunk(num)[rank])
        gathered = torch.empty(2**20 * num, device=device)
        dist.all_gather_into_tensor(gathered, part, group=group)
        torch.testing.assert_close(gathered, total)
    return f"{num} ranks, 3 collectives"


def bus() -> str:
    """The rate at which each rank sends and receives in a sum over all ranks."""
    device = device_of_rank()
    with running():
        tensor = torch.zeros(_BUS_BYTES // 4, device=device)
        num = dist.get_world_size()
        seconds = fastest(lambda: dist.all_reduce(tensor), device, runs=5)
        backend = dist.get_backend()
    return f"{2 * (num - 1) / num * _BUS_BYTES / seconds / 1e9:.2f} GB/s a rank, {num} ranks, {backend}"


def predicted() -> str:
    """A measured plan beside its step, and its memory beside the allocator's."""
    device = device_of_rank()
    with running(plan_one_stage=True, profile="measured"):
        step = _step_of(device, width=256 if device.type == "cuda" else 64, length=256)
        step()  # plans: what it has measured is no part of a step's memory
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = fastest(step, device, runs=5)
        plan = context().plan
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        assert plan is not None
        assert plan.prediction is not None
        expected = plan.prediction
    text = f"step {format_seconds(seconds)}, predicted {format_seconds(expected.step_s)}"
    if peak:
        text += f"; peak {format_bytes(peak)}, predicted {format_bytes(expected.memory[0].peak_bytes)}"
    return text


def timed_both_ways() -> str:
    """The sentence of a plan on units that were timed as written and compiled; on any device."""
    device = device_of_rank()
    compiled_modules.auto_compiles = lambda device: True
    with running(plan_one_stage=True, profile="measured", compile="auto"):
        _step_of(device, width=256 if device.type == "cuda" else 64, length=256)()
        plan = context().plan
        assert plan is not None
        return plan.why[-1]


def _step_of(
    device: torch.device, *, width: int, length: int, layers: int = 4, samples: int = 8
) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = sw.DistributedModel(gpt(width, layers=layers, words=1024))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    ids = torch.randint(0, 1024, (samples, length), device=device)

    @sw.step
    def train(model: Any, ids: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model, ids)
        model.backward(loss)
        return loss.detach()

    run: Any = train

    def step() -> None:
        optimizer.zero_grad()
        run(model, ids)
        optimizer.step()

    return step


def gpt_step(*, compile: str = "off") -> str:
    """Model FLOPs of a GPT's steps in bfloat16, as a share of what products of matrices reach alone."""
    device = device_of_rank()
    width, length, layers, samples = (1024, 1024, 12, 8) if device.type == "cuda" else (64, 32, 2, 4)
    rates = measure_products(device, "bfloat16", progress=lambda: None)
    with running(microbatches=1, compile=compile):
        step = _step_of(device, width=width, length=length, layers=layers, samples=samples)
        begun_s = time.perf_counter()
        step()
        first_s = time.perf_counter() - begun_s
        seconds = fastest(step, device, runs=5)
    weights = 12 * layers * width**2 + 1024 * width
    flops = samples * length * (6 * weights + 6 * layers * width * length)  # causal: half of the scores
    share = flops / seconds / max(rate.alone for rate in rates)
    times = f"step {format_seconds(seconds)}, first {format_seconds(first_s)}"
    return f"{share:.0%} of the rate of products; {times}"


_SCRIPT = """
import shardwright.torch as sw
sw.init({"run_dir": "off"})
print("computes on", sw.device())
sw.shutdown()
"""


_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


def launched() -> str:
    """Starts a script by ``shardwright run``: each rank has a device of its own."""
    kind = device_of_rank().type
    num_ranks = torch.cuda.device_count() if kind == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT)
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith(_OF_RANKS)}
        words = [sys.executable, "-m", "shardwright", "run", "-n", str(num_ranks), str(script)]
        found = subprocess.run(words, capture_output=True, text=True, env=inherited, check=False, cwd=folder)
    if found.returncode:
        raise RuntimeError((found.stderr.strip() or found.stdout.strip()).splitlines()[-1])
    lines = found.stdout.splitlines()
    devices = sorted(line.rsplit(" ", 1)[1] for line in lines if "computes on" in line)
    expected = sorted(f"cuda:{n}" if kind == "cuda" else "cpu" for n in range(num_ranks))
    if devices != expected:
        raise AssertionError(f"ranks are on {', '.join(devices)}, and not on {', '.join(expected)}")
    return f"{num_ranks} ranks on {', '.join(dict.fromkeys(devices))}"
