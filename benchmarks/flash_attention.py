"""Measures what ``sw.model_creation(flash_attention=True)`` does for six models of transformers.

    python benchmarks/flash_attention.py                 # on a GPU in bf16 if there is one, else on the CPU
    python benchmarks/flash_attention.py --quick         # does it still run?
    python benchmarks/flash_attention.py --check --json found.json

A  bytes that a token and a layer keep for the backward, at 128 to 4,096 tokens, eager and with the switch
B  seconds of a step (forward and backward, no optimizer) in turns, peak memory (on a GPU), the loss of both
C  the longest sequence of which one step fits into the GPU (tried by doubling)

The sizes are those of GPT-2 medium on a GPU, and small ones on a CPU. Dropout is 0 in A to C but for the
line "A, dropout". Eager is what transformers computes with ``attn_implementation="eager"``.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONWARNINGS"] = "ignore"

import torch
import transformers
from torch import Tensor, nn

import shardwright.torch as sw
from check import Check, lines
from machine import circumstances
from shardwright.quantities import format_bytes
from shardwright.torch.attention.hugging_face import attention_table

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32

_KEPT_AT = (128, 256, 512, 1024, 2048, 4096)
_LONGEST_TRIED = 2**16


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model: `hidden` channels in `heads` heads, and so on."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int


SMALL = Size(layers=4, hidden=64, heads=4, vocabulary=128)
SIZE = Size(layers=24, hidden=1024, heads=16, vocabulary=50304) if GPU else Size(4, 256, 4, 1024)


def _bert(kind: Any) -> Callable[..., Any]:
    def config(size: Size, positions: int, dropout: float, **more: Any) -> Any:
        return kind(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden,
            max_position_embeddings=positions + 2,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **_TOKENS,
            **more,
        )

    return config


def _gpt(kind: Any, **own: Any) -> Callable[..., Any]:
    def config(size: Size, positions: int, dropout: float, **more: Any) -> Any:
        return kind(
            vocab_size=size.vocabulary,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=positions,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            **_TOKENS,
            **own,
            **more,
        )

    return config


def _gpt_neo(size: Size, positions: int, dropout: float, **more: Any) -> Any:
    return transformers.GPTNeoConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        attention_types=[[["global", "local"], size.layers // 2]],
        window_size=min(256, positions),
        max_position_embeddings=positions,
        attention_dropout=dropout,
        resid_dropout=dropout,
        embed_dropout=dropout,
        **_TOKENS,
        **more,
    )


def _gpt_neox(size: Size, positions: int, dropout: float, **more: Any) -> Any:
    return transformers.GPTNeoXConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=positions,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        **_TOKENS,
        **more,
    )


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

MODELS: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "BERT": (transformers.BertForMaskedLM, _bert(transformers.BertConfig)),
    "RoBERTa": (transformers.RobertaForMaskedLM, _bert(transformers.RobertaConfig)),
    "GPT-2": (transformers.GPT2LMHeadModel, _gpt(transformers.GPT2Config)),
    "GPT-J": (transformers.GPTJForCausalLM, _gpt(transformers.GPTJConfig, rotary_dim=16)),
    "GPT-Neo": (transformers.GPTNeoForCausalLM, _gpt_neo),
    "GPT-NeoX": (transformers.GPTNeoXForCausalLM, _gpt_neox),
}

EAGER, SWITCH = "eager", "switch"


def build(name: str, side: str, size: Size, *, positions: int, dropout: float = 0.0) -> Any:
    """A model in training mode; both sides have the same weights."""
    kind, config_of = MODELS[name]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with DEVICE:
            if side == EAGER:
                model = kind(config_of(size, positions, dropout, attn_implementation="eager"))
            else:
                with sw.model_creation(flash_attention=True):
                    model = kind(config_of(size, positions, dropout))
    finally:
        torch.set_default_dtype(before)
    model.config.use_cache = False
    return model.train()


def batch(size: Size, *, samples: int, tokens: int) -> Tensor:
    """Token numbers, of which 0 to 2 mean something special."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, size.vocabulary, (samples, tokens), generator=generator).to(DEVICE)


def step(model: Any, ids: Tensor) -> float:
    """Forward and backward; the loss."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


# ---- A: kept bytes ----


def kept_bytes(model: Any, ids: Tensor) -> int:
    """What a forward keeps for the backward, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model.base_model(input_ids=ids).last_hidden_state
    del result
    return sum(num_bytes for num_bytes, _ in kept.values())


def kept_section(lengths: tuple[int, ...]) -> tuple[dict[str, Any], list[Check]]:
    """Bytes for a token and a layer, by model, side and length."""
    found: dict[str, Any] = {}
    worst = (0.0, "")
    for name in MODELS:
        for dropout, sides in ((0.0, (EAGER, SWITCH)), (0.1, (SWITCH,))):
            for side in sides:
                model = build(name, side, SMALL, positions=max(lengths), dropout=dropout)
                per_token = {
                    tokens: kept_bytes(model, batch(SMALL, samples=1, tokens=tokens)) / tokens / SMALL.layers
                    for tokens in lengths
                }
                found[f"{name}, {side}{', dropout' if dropout else ''}"] = {
                    str(tokens): round(value) for tokens, value in per_token.items()
                }
                if side == SWITCH:
                    growth = per_token[lengths[-1]] / per_token[lengths[0]]
                    worst = max(worst, (growth, f"{name}, dropout {dropout}"))
    what = f"bytes of a token, {lengths[-1]:,} tokens / {lengths[0]:,}, switch"
    return found, [Check(section="A", what=what, value=worst[0], target=1.05, where=worst[1])]


# ---- B: seconds and peak memory ----


def speed_section(*, samples: int, tokens: int, rounds: int) -> tuple[dict[str, Any], list[Check]]:
    """Seconds and bytes of a step, both sides in turns."""
    found: dict[str, Any] = {}
    slowest, largest, farthest = (0.0, ""), (0.0, ""), (0.0, "")
    ids = batch(SIZE, samples=samples, tokens=tokens)
    for name in MODELS:
        seconds: dict[str, list[float]] = {EAGER: [], SWITCH: []}
        peaks, losses = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0.0)
        with freed_afterwards():
            models = {side: build(name, side, SIZE, positions=tokens) for side in seconds}
            for number in range(rounds + 1):
                for side, model in models.items():
                    taken_s, peaks[side], losses[side] = measured(model, ids)
                    if number:  # the first one warms up
                        seconds[side].append(taken_s)
            table = attention_table(models[SWITCH])
            del models, model
        medians = {side: statistics.median(times) for side, times in seconds.items()}
        found[name] = {
            "s": {side: round(value, 4) for side, value in medians.items()},
            "spread": {side: round(max(times) / min(times) - 1, 3) for side, times in seconds.items()},
            **({"peak bytes": peaks} if GPU else {}),
            "loss": losses,
            "kernels": table.strip(),
        }
        slowest = max(slowest, (medians[SWITCH] / medians[EAGER], name))
        farthest = max(farthest, (abs(losses[SWITCH] - losses[EAGER]) / losses[EAGER], name))
        if GPU:
            largest = max(largest, (peaks[SWITCH] / peaks[EAGER], name))
    ratios = [("loss, difference", farthest, 0.01)]
    if GPU:  # on a CPU the switch is for memory alone
        ratios += [("step, switch / eager", slowest, 1.0), ("peak memory, switch / eager", largest, 1.0)]
    checks = [
        Check(section="B", what=what, value=value, target=target, where=where)
        for what, (value, where), target in ratios
    ]
    return found, checks


def measured(model: Any, ids: Tensor) -> tuple[float, int, float]:
    """Seconds, peak bytes (0 on a CPU) and loss of a step."""
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun_s = time.perf_counter()
    loss = step(model, ids)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begun_s, torch.cuda.max_memory_allocated() if GPU else 0, loss


# ---- C: the longest sequence ----


def length_section(*, limit: int) -> tuple[dict[str, Any], list[Check]]:
    """Tokens of the longest sequence of which one step fits."""
    found = {name: {side: longest(name, side, limit=limit) for side in (EAGER, SWITCH)} for name in MODELS}
    gain, where = min((of[SWITCH] / of[EAGER], name) for name, of in found.items())
    what = "longest sequence, switch / eager"
    return found, [Check(section="C", what=what, value=gain, target=2.0, at_least=True, where=where)]


def longest(name: str, side: str, *, limit: int) -> int:
    """The last length that fits, of 2,048 times powers of two; half as many where not even that fits."""
    tokens = 2048
    while tokens <= limit and fits(name, side, tokens):
        tokens *= 2
    return tokens // 2


def fits(name: str, side: str, tokens: int) -> bool:
    """Whether one step of one sequence fits."""
    with freed_afterwards():
        try:
            step(build(name, side, SIZE, positions=tokens), batch(SIZE, samples=1, tokens=tokens))
        except torch.OutOfMemoryError:
            return False
        return True


@contextmanager
def freed_afterwards() -> Iterator[None]:
    """Gives memory back to the GPU in the end."""
    try:
        yield
    finally:
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


# ---- all of it ----


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small: does it still run?")
    parser.add_argument("--check", action="store_true", help="print targets only, and fail if one is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    where = circumstances() | {
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if GPU else "cpu",
        "type": str(DTYPE).removeprefix("torch."),
    }
    print("\n".join(f"{key}: {value}" for key, value in where.items()))
    found: dict[str, Any] = {}
    checks: list[Check] = []
    sections: dict[str, Callable[[], tuple[dict[str, Any], list[Check]]]] = {
        "A  bytes kept by a token and a layer": lambda: kept_section(
            _KEPT_AT[: 3 if options.quick else None]
        ),
        "B  a step": lambda: speed_section(
            samples=8 if GPU else 2,
            tokens=128 if options.quick else 1024 if GPU else 512,
            rounds=2 if options.quick else 7 if GPU else 5,
        ),
    }
    if GPU:
        limit = 4096 if options.quick else _LONGEST_TRIED
        sections["C  longest sequence"] = lambda: length_section(limit=limit)
    for title, section in sections.items():
        begun_s = time.perf_counter()
        found[title], more = section()
        checks += more
        if not options.check:
            print(f"\n{title} ({time.perf_counter() - begun_s:.0f} s)\n{shown(found[title])}", flush=True)
    print()
    print("\n".join(lines(checks)))
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        kept = {"circumstances": where, "figures": found, "checks": verdicts}
        options.json.write_text(json.dumps(kept, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


def shown(table: dict[str, Any]) -> str:
    """A line for each row, the kernels below it."""
    rows = []
    for name, row in table.items():
        cells = {key: value for key, value in row.items() if key != "kernels"}
        if "peak bytes" in cells:
            cells["peak bytes"] = {side: format_bytes(value) for side, value in cells["peak bytes"].items()}
        rows.append(f"  {name:<26}{'  '.join(f'{key}: {value}' for key, value in cells.items())}")
        if "kernels" in row:
            rows.append(f"    {row['kernels']}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
