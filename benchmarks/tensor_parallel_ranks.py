"""What each rank of `tensor_parallel.py` does: steps of one model, divided in several ways, in turns.

Contenders::

    torch   parallelize_module: columns, then rows; the head by columns, its logits gathered
    hf      transformers' own tp_plan
    parts   Shardwright's divided tensors by themselves: placements found and used, no pipeline, no schedule
    ours    Shardwright: sw.init({"tensor_parallel_degree": ranks})
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright.torch as sw
from model_units import loss_alone, units_of
from shardwright.run.context import context, set_context
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup, Traffic
from shardwright.torch.tensor_parallel.search.dry_run import dry_run
from shardwright.torch.tensor_parallel.search.search import find_placements

__all__ = ["MODELS", "race"]

WORDS, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 8192, 512, 4, 8, 256, 4

_COLUMNS = {
    "llama": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"],
    "gpt_neox": ["attention.query_key_value", "mlp.dense_h_to_4h"],
}
_ROWS = {
    "llama": ["self_attn.o_proj", "mlp.down_proj"],
    "gpt_neox": ["attention.dense", "mlp.dense_4h_to_h"],
}
_LAYERS_OF = {"llama": "model.layers", "gpt_neox": "gpt_neox.layers"}
MODELS = tuple(_LAYERS_OF)


@dataclass(slots=True)
class Contender:
    """One way to train.

    Attributes:
        step: one step on these tokens, with the update; returns the loss.
        states: tensors of parameters, gradients and updates that this rank keeps, after a step.
        facts: what else is known of it.
    """

    step: Callable[[Tensor], float]
    states: Callable[[], list[Tensor]]
    facts: dict[str, Any] = field(default_factory=dict)


def model_of(name: str) -> Any:
    """The same on every rank."""
    import transformers

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
    }
    torch.manual_seed(0)
    if name == "llama":
        config: Any = transformers.LlamaConfig(**sizes, intermediate_size=1408, num_key_value_heads=HEADS)
        made: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.GPTNeoXConfig(
            **sizes, intermediate_size=4 * WIDTH, hidden_dropout=0.0, attention_dropout=0.0
        )
        made = transformers.GPTNeoXForCausalLM
    config.use_cache = False
    return made(config).train()


def tokens_of(number: int) -> Tensor:
    """(BATCH, LENGTH) tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def contender_of(kind: str, name: str, prices: Prices) -> Contender:
    """A contender that trains this model."""
    if kind == "ours":
        return _ours(model_of(name))
    if kind == "parts":
        return _parts(model_of(name), name, prices)
    model = _by_torch(model_of(name), name) if kind == "torch" else _by_transformers(model_of(name))
    return _trained_plainly(model)


def _trained_plainly(model: nn.Module, settle: Callable[[], None] | None = None) -> Contender:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if settle is not None:
            settle()
        optimizer.step()
        return float(_all(loss.detach()))

    def states() -> list[Tensor]:
        found = []
        for parameter in model.parameters():
            own = [parameter, parameter.grad, *optimizer.state[parameter].values()]
            found += [_own(each) for each in own if isinstance(each, Tensor) and each.dim() > 0]
        return found

    return Contender(step, states)


def _all(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else local_of(tensor.detach())


def _by_torch(model: nn.Module, name: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {}
    for index in range(LAYERS):
        layer = f"{_LAYERS_OF[name]}.{index}"
        plan |= {f"{layer}.{each}": ColwiseParallel() for each in _COLUMNS[name]}
        plan |= {f"{layer}.{each}": RowwiseParallel() for each in _ROWS[name]}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def _by_transformers(model: Any) -> nn.Module:
    """As `from_pretrained` with a `DistributedConfig` does it, without files."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(tp_size=dist.get_world_size())
    _, meshes = initialize_distributed_mesh(config)
    found: nn.Module = type(model).maybe_distribute_model(model, config, meshes)
    return found.train()


def _parts(model: nn.Module, name: str, prices: Prices) -> Contender:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    layers = [f"{_LAYERS_OF[name]}.{index}" for index in range(LAYERS)]
    batch = {"input_ids": ids, "labels": ids}
    units = units_of(model, kwargs=batch, units=layers, run=loss_alone)
    num_ranks = dist.get_world_size()
    found = find_placements(units, num_ranks=num_ranks, prices=prices)
    layer, own = units[layers[0]], found.of_unit(layers[0])
    of_layer = dry_run(layer, own, rank=dist.get_rank(), num_ranks=num_ranks, prices=prices)
    group = tensor_group(prices=prices)
    divide(model, found.placements, group)
    contender = _trained_plainly(model, lambda: settle_gradients(model.parameters()))
    parameters = sum(local_of(each).nbytes for each in model.parameters())
    contender.facts = {
        "divided": found.divided,
        "planned calls of a layer": (of_layer.forward.traffic + of_layer.backward.traffic).calls.total(),
        "bytes of parts": 4 * parameters,  # a gradient, and two numbers of AdamW for each
        "is divided": any(isinstance(each, DividedTensor) for each in model.parameters()),
    }
    return contender


def _ours(model: nn.Module) -> Contender:
    set_context(None)  # several contenders side by side in one process
    sw.init({"run_dir": "off", "tensor_parallel_degree": dist.get_world_size(), "microbatches": 1})
    wrapped = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-4))
    own = context()

    @sw.step
    def train(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    clock: _Clock | None = None
    group: Any = None

    def step(ids: Tensor) -> float:
        nonlocal clock, group
        set_context(own)
        optimizer.zero_grad()
        begin_s = time.perf_counter()
        loss = train(wrapped, ids).reduce_mean()
        trained_s = time.perf_counter()
        optimizer.step()
        updated_s = time.perf_counter() - trained_s
        if clock is None:
            contender.facts |= _predicted()
            divided = next(p for p in wrapped.local_parameters() if isinstance(p, DividedTensor))
            group = divided._spec.group
            clock = _Clock(group)
            group.traffic = Traffic()  # of the next step
        else:
            if "sent bytes" not in contender.facts:
                contender.facts["sent bytes"] = group.traffic.sent_bytes.total()
                contender.facts["calls"] = group.traffic.calls.total()
            clock.steps.append((trained_s - begin_s, clock.taken_s(), updated_s))
            columns = zip("pass exchange update".split(), zip(*clock.steps, strict=True), strict=True)
            contender.facts |= {f"{what} seconds": statistics.median(column) for what, column in columns}
        return float(loss)

    def _predicted() -> dict[str, float]:
        plan = own.plan
        if plan is None or plan.prediction is None:
            return {}
        prediction = plan.prediction
        exchange_s = sum(each.forward_exchange_s + each.backward_exchange_s for each in prediction.stages)
        return {
            # What is timed has the optimizer's update in it, and the plan's step has not.
            "predicted seconds": prediction.step_s + prediction.update_s,
            "predicted exchange": exchange_s,
            "predicted update": prediction.update_s,
            "planned bytes": sum(each.exchange_bytes for each in prediction.stages),
        }

    contender = Contender(step, list)
    return contender


class _Clock:
    """Takes the time of all collectives of a tensor-parallel group.

    Args:
        group: the ranks.

    Attributes:
        steps: seconds of forward and backward, of collectives, and of the update.
    """

    def __init__(self, group: TensorGroup):
        self.steps: list[tuple[float, float, float]] = []
        self._seconds = 0.0
        collectives = group.collectives
        for name in ("all_reduce", "all_gather", "all_to_all"):
            setattr(collectives, name, self._timed(getattr(collectives, name)))

    def taken_s(self) -> float:
        """Seconds since it was asked for last."""
        taken_s, self._seconds = self._seconds, 0.0
        return taken_s

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            begin_s = time.perf_counter()
            call(*args)
            self._seconds += time.perf_counter() - begin_s

        return timed


# ---- what runs ----


def measured_prices() -> Prices:
    """Latency and bandwidth of an all-reduce over all ranks; rates of products and of copies."""
    small, large = torch.zeros(8), torch.zeros(2**20)
    latency_s = _seconds(lambda: dist.all_reduce(small))
    large_s = _seconds(lambda: dist.all_reduce(large))
    num_ranks = dist.get_world_size()
    sent = 2 * (num_ranks - 1) * large.nbytes / num_ranks
    a, b, c = torch.randn(512, 512), torch.randn(512, 512), torch.zeros(2**22)
    flops_per_s = 2 * 512**3 / _seconds(lambda: torch.mm(a, b))
    memory_Bps = 2 * c.nbytes / _seconds(lambda: c.add_(1))
    found = [latency_s, sent / max(large_s - latency_s, 1e-9), flops_per_s, memory_Bps]
    shared: list[Any] = [found]
    dist.broadcast_object_list(shared)
    return Prices(*shared[0])


def _seconds(call: Callable[[], Any], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def race(kinds: list[str], name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a step of every contender, round by round, in changing order; losses; what is kept.

    Those of the processor tell more where others keep the machine busy.
    """
    prices = measured_prices()
    contenders = {kind: contender_of(kind, name, prices) for kind in kinds}
    losses = {kind: [each.step(tokens_of(n)) for n in range(2)] for kind, each in contenders.items()}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    core: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            contenders[kind].step(tokens_of(number))  # follows a rest
            dist.barrier()
            start, start_core = time.perf_counter(), time.process_time()
            for index in range(steps):
                contenders[kind].step(tokens_of(number * steps + index))
            core[kind].append((time.process_time() - start_core) / steps)
            dist.barrier()
            times[kind].append((time.perf_counter() - start) / steps)
    gc.collect()
    kept = {}
    for kind, each in contenders.items():
        memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in each.states()}
        kept[kind] = sum(memories.values())
    facts: list[Any] = [None] * dist.get_world_size()
    own = {
        kind: {**each.facts, "kept bytes": kept[kind], "core seconds": statistics.median(core[kind])}
        for kind, each in contenders.items()
    }
    dist.all_gather_object(facts, own)
    return {"seconds": times, "losses": losses, "facts": facts, "prices": str(prices)}


def main() -> None:
    """Races under torchrun; rank 0 writes what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = race(options.kinds, options.model, options.rounds, options.steps)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several libraries with groups and hooks of their own in one process


if __name__ == "__main__":
    main()
