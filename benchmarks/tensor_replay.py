"""What it would save to record a layer's local operations once, and to run the list in place of its Python.

One process stands for a rank of two, and exchanges nothing. The list is the least that any replay can cost:
no guards, no hooks, no autograd. It frees what is no longer needed as early, and must give the same numbers.

    OMP_NUM_THREADS=1 python benchmarks/tensor_replay.py
    OMP_NUM_THREADS=1 python benchmarks/tensor_replay.py --width 64 --length 8    # Python's time alone

Processor time of a layer's forward and backward; medians of runs in turns. `plain` is the whole layer.
"""

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from model_units import loss_alone, units_of
from shardwright.text import align
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.decision import direct_call
from shardwright.torch.tensor_parallel.divide import divide
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks
from shardwright.torch.tensor_parallel.search.search import find_placements

BATCH, HEADS = 4, 8


class Layer:
    """A model's second layer, as a rank of two has it, with what the model calls it with."""

    def __init__(self, kind: str, width: int, length: int):
        model, name = _model(kind, width, length)
        ids = torch.zeros(BATCH, length, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        layer = model.get_submodule(name)
        calls: list[Any] = []
        hook = layer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        with torch.no_grad():
            model(**batch)
        hook.remove()
        self.plain = copy.deepcopy(layer)
        units = units_of(model, kwargs=batch, units=[name], run=loss_alone)
        found = find_placements(units, num_ranks=2, prices=Prices())
        self.group: TensorGroup = group_without_ranks(0, 2, Prices())
        divide(model, found.placements, self.group)
        self.divided, (args, self._kwargs) = layer, calls[0]
        self._others, self._x = args[1:], torch.randn(args[0].shape)
        self._gradient = torch.randn(args[0].shape)

    def step(self, layer: nn.Module) -> None:
        """A forward and a backward."""
        boundary, x = Boundary(self.group), self._x.detach().requires_grad_()
        boundary.watch_gradients(x)
        result = layer(x, *self._others, **self._kwargs)
        result = result[0] if isinstance(result, tuple) else result
        torch.autograd.backward(boundary.placed(result), self._gradient)
        layer.zero_grad()


def _model(kind: str, width: int, length: int) -> tuple[Any, str]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width if kind == "gpt_neox" else 11 * width // 4,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "vocab_size": 64,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), "model.layers.1"
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **none)), "gpt_neox.layers.1"


class Recording(TorchDispatchMode):
    """What a rank computes.

    Attributes:
        num_dispatched: operations on divided tensors.
        operations: on parts and on whole tensors: the operator, its arguments, its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_dispatched = 0
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DividedTensor in types:
            self.num_dispatched += 1
            return NotImplemented  # its parts come by
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class Slot(int):
    """The place of a tensor among all of a list."""


class Replay:
    """Operations one after the other, without what made them."""

    def __init__(self, operations: list[tuple[Any, Any, Any, Any]]):
        slots: dict[int, Slot] = {}
        self._values: list[Any] = []
        lines, last = [], {}
        for number, (func, args, kwargs, result) in enumerate(operations):
            for each in tree_iter((args, kwargs)):
                if isinstance(each, Tensor) and id(each) not in slots:
                    slots[id(each)] = Slot(len(self._values))  # from outside: it stays
                    self._values.append(each)
            made = []
            for each in tree_iter(result):
                if isinstance(each, Tensor) and id(each) not in slots:
                    slots[id(each)] = Slot(len(self._values))
                    self._values.append(None)
                    made.append(slots[id(each)])
            used = [slots[id(each)] for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)]
            last |= {slot: number for slot in used if self._values[slot] is None}
            args, kwargs = tree_map_only(Tensor, lambda each: slots[id(each)], (args, kwargs))
            lines.append((direct_call(func), args, kwargs, made, isinstance(result, Tensor)))
        freed: list[list[int]] = [[] for _ in lines]
        for slot, number in last.items():
            freed[number].append(slot)
        self._lines = [(*line, slots) for line, slots in zip(lines, freed, strict=True)]

    def run(self, keep: Callable[[Any], None] | None = None) -> None:
        """Runs all. Args: keep: is given every result."""
        values = self._values[:]
        for call, args, kwargs, made, is_one, freed in self._lines:
            result = call(*[_filled(each, values) for each in args], **kwargs)
            if keep is not None:
                keep(result)
            if is_one and made:
                values[made[0]] = result
            elif made:
                tensors = [each for each in result if isinstance(each, Tensor)]
                for slot, tensor in zip(made, tensors, strict=True):
                    values[slot] = tensor
            del result
            for slot in freed:
                values[slot] = None


def _filled(item: Any, values: list[Any]) -> Any:
    if item.__class__ is Slot:
        return values[item]
    if item.__class__ is list:
        return [_filled(each, values) for each in item]
    return item


def measured(kind: str, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    layer = Layer(kind, options.width, options.length)
    for _ in range(2):
        layer.step(layer.divided)  # decides
    with Recording() as seen:
        layer.step(layer.divided)
    replay, num_local = Replay(seen.operations), len(seen.operations)
    _check(replay, seen.operations)
    seen.operations.clear()
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: layer.step(layer.plain),
        "dispatched": lambda: layer.step(layer.divided),
        "list": replay.run,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 2):
        for name in sorted(runs, reverse=bool(number % 2)):
            start = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - start)
    plain_ms, dispatched_ms, list_ms = (1e3 * statistics.median(each[2:]) for each in times.values())
    saved = statistics.median(a - b for a, b in zip(times["dispatched"][2:], times["list"][2:], strict=True))
    return [
        *(kind, str(seen.num_dispatched), str(num_local)),
        *(f"{each:.2f}" for each in (plain_ms, dispatched_ms, list_ms)),
        f"{saved * 1e3:.2f}",
        f"{saved * 1e5 / dispatched_ms:.1f} %",
        f"{saved * 1e6 / seen.num_dispatched:.1f}",
    ]


def _check(replay: Replay, operations: list[tuple[Any, Any, Any, Any]]) -> None:
    """Refuses to compare the speed of different work."""
    found: list[Any] = []
    replay.run(found.append)
    wanted = [each for *_, result in operations for each in tree_iter(result) if isinstance(each, Tensor)]
    have = [each for each in tree_iter(found) if isinstance(each, Tensor)]
    for one, other in zip(have, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def main() -> None:
    """Measures both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    head = "layer,dispatched,local,plain ms,dispatched ms,list ms,saved ms,of it,us each".split(",")
    print(align([head, *(measured(kind, options) for kind in ("llama", "gpt_neox"))]))


if __name__ == "__main__":
    main()
