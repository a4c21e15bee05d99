"""The table of checks: each path of the library that touches a GPU, and the files that it leads through."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.testing.gpu_checks import rates
from shardwright.testing.gpu_checks.training import Skipped, Training, device_of_rank, parity

EVERY_GPU = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One path.

    Attributes:
        name: in the table.
        runs: what it does, in words.
        files: of ``src/shardwright``, by spaces, that have never run on a GPU.
        call: on each rank: how the model is trained; or a function that gives its figures, and raises where
            something is wrong.
        ranks: that it takes; `EVERY_GPU`.
        needs_gpu: it has nothing to run on a CPU.
        shares_card: its ranks may compute on one GPU.
        timeout_s: seconds that it may take.
    """

    name: str
    runs: str
    files: str
    call: Training | Callable[[], str]
    ranks: int = 1
    needs_gpu: bool = False
    shares_card: bool = False
    timeout_s: float = 60.0

    def __call__(self) -> str:
        """Runs it on this rank; tells its figures."""
        return parity(self.call) if isinstance(self.call, Training) else self.call()


def _in_8_bits(model: nn.Module) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise Skipped("torchao is not installed: pip install torchao")
    from torchao.float8 import (  # type: ignore[import-untyped]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    on_gpu = device_of_rank().type == "cuda"
    if on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("this GPU has no products in 8 bits, which compute capability 8.9 brought")
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=not on_gpu),
        module_filter_fn=lambda _, name: name.endswith(("up", "down")),
    )


def _with_graphs(model: nn.Module) -> nn.Module:
    return torch.compile(model, mode="reduce-overhead")  # type: ignore[return-value]


_F32 = torch.float32
_STAGES = {"pipeline_parallel_degree": 2}
_REPLICAS = {"data_parallel_degree": 2, "microbatches": 1}
_SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "microbatches": 1}
_SAVINGS = {**_STAGES, "pipeline": "zb_h1", "offload_activations": True, "offload_optimizer": True}


def _with(**settings: Any) -> Training:
    return Training(settings=settings)


# fmt: off
CHECKS: tuple[Check, ...] = (
    Check("products", "products of matrices by type",
          "torch/rank_probe.py run/machine.py torch/measuring/device_rates.py", rates.products),
    Check("memory", "copies in the device's memory; from pinned and pageable memory of the host",
          "torch/rank_probe.py", rates.memory),
    Check("copies beside work", "a stream that copies to pinned memory, with events, beside products",
          "torch/offload/saved_storage.py", rates.copies_beside_work, needs_gpu=True),
    Check("attention kernels", "each kernel that attention chooses beside scores in full; dropout in blocks",
          "torch/attention/kernels.py torch/attention/blockwise.py", rates.attention),
    Check("one rank", "a GPT in float64 beside a plain loop",
          "run/joining.py torch/startup.py torch/optimizer/distributed_optimizer.py", _with()),
    Check("dropout, recomputed", "the device's random numbers, drawn again in the backward",
          "torch/randomness.py", Training(settings={"activation_checkpointing": "full"}, dropout=0.2)),
    Check("autocast", "torch.autocast in bfloat16 around the loss",
          "torch/pytorch/tensors.py", Training(dtype=_F32, autocast=torch.bfloat16, tolerance=1e-3)),
    Check("GradScaler", "torch.amp.GradScaler, with autocast in float16",
          "torch/optimizer/distributed_optimizer.py",
          Training(dtype=_F32, autocast=torch.float16, scaled=True, tolerance=1e-3)),
    Check("bf16", "weights in bfloat16, updates in float32", "torch/replicas/replica_buffers.py",
          Training(settings={"bf16": True}, dtype=_F32, rounded=torch.bfloat16, tolerance=1e-1)),
    Check("fp16", "weights in float16, with a loss scale", "torch/loss_scale.py",
          Training(settings={"fp16": True}, dtype=_F32, rounded=torch.float16, tolerance=2e-2)),
    Check("offloaded activations", "what units keep leaves for pinned memory, and comes back",
          "torch/offload/offloading.py torch/offload/saved_storage.py", _with(offload_activations=True)),
    Check("offloaded optimizer", "state and updates in the host's memory",
          "torch/replicas/replica_buffers.py", _with(offload_optimizer=True)),
    Check("optimizer state in 8 bits", "moments in 8 bits, rounded by chance",
          "torch/optimizer/packing.py",
          Training(settings={"optimizer_state": "8bit"}, dtype=_F32, tolerance=1e-1)),
    Check("loss in pieces", "logits of a head computed piece by piece",
          "torch/backward/pending_logits.py", _with(loss_chunks=4)),
    Check("first values", "a model without memory gets its values on the device",
          "torch/parameters/materialise.py", Training(from_meta=True)),
    Check("checkpoint", "two steps, saved and resumed with the device's random numbers, two more",
          "torch/checkpoints/snapshot.py", Training(resumed=True, dropout=0.2)),
    Check("linear layers in 8 bits", "torchao's float8 layers", "torch/pytorch/functions.py",
          Training(dtype=_F32, prepared=_in_8_bits, tolerance=2e-3)),
    Check("compiled units", "units by PyTorch's compiler, once a kind, with dropout",
          "torch/counting/compiled_modules.py",
          Training(settings={"compile": "on"}, dtype=_F32, dropout=0.2, tolerance=1e-4), timeout_s=180),
    Check("CUDA graphs", "the model under torch.compile(mode='reduce-overhead')",
          "torch/interception/compiled_code.py",
          Training(compiled=_with_graphs, dtype=_F32, tolerance=1e-4), needs_gpu=True, timeout_s=180),
    Check("measured plan", "units timed by events; a step, and the allocator's peak, beside the plan",
          "torch/measuring/measure.py run/memory.py run/reporting.py", rates.predicted),
    Check("timed both ways", "units timed as written and compiled, as compile: auto does",
          "torch/measuring/compiled_times.py", rates.timed_both_ways, timeout_s=240),
    Check("GPT step", "model FLOPs of a GPT in bfloat16 beside the rate of products", "", rates.gpt_step),
    Check("GPT step, compiled", "the same with compiled units", "torch/counting/compiled_modules.py",
          partial(rates.gpt_step, compile="on"), timeout_s=240),
    Check("shardwright run", "a script on every GPU: each rank has one of its own",
          "launch/engines/local.py launch/ranks/agent.py launch/placement.py cli/commands/run.py",
          rates.launched),
    Check("replicas on one card", "two replicas that share a GPU, by gloo", "torch/replicas/reducer.py",
          _with(ddp_dist_backend="gloo", **_REPLICAS), ranks=2, shares_card=True),
    Check("replicas", "sums of gradients by NCCL, beside the backward",
          "torch/replicas/reducer.py comm/joining/facts.py", _with(**_REPLICAS), ranks=2),
    Check("two stages", "activations and gradients between GPUs by NCCL",
          "comm/transport.py comm/tensor_codec.py", _with(**_STAGES), ranks=2),
    Check("two stages, all savings", "a zero-bubble schedule with offload of activations and optimizer",
          "torch/offload/stage_offload.py", _with(**_SAVINGS), ranks=2),
    Check("tensor parallelism", "layers that two GPUs share",
          "torch/tensor_parallel/search/unit.py", _with(tensor_parallel_degree=2), ranks=2),
    Check("context parallelism", "sequences that two GPUs share",
          "torch/tensor_parallel/boundary.py", _with(context_parallel_degree=2), ranks=2),
    Check("shards", "parameters, gradients and optimizer state in rows, gathered by NCCL",
          "torch/sharding", _with(**_SHARDS), ranks=2),
    Check("collectives", "the library's own backend on streams of the device",
          "comm/collectives/device_lanes.py comm/collectives/device_collectives.py comm/_private.py "
          "comm/collectives/backend.py comm/collectives/shardwright_process_group.py",
          rates.collectives, EVERY_GPU),
    Check("all-reduce", "the bus rate of a sum over every GPU", "comm/_private.py", rates.bus, EVERY_GPU),
)
# fmt: on
