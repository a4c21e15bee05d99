"""Losses, gradients, plans, predictions and a checkpoint's manifest of a part of the zoo, as one JSON file.

Kernels differ between machines: write the file before a change, and compare with it after, on one machine.

    python benchmarks/golden.py write /tmp/golden.json
    python benchmarks/golden.py compare /tmp/golden.json
"""

# ruff: noqa: E402
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SHARDWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="shardwright-golden-")
sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("ranks", "")]

import torch
from transparency import Recipe
from zoo import ZOO

import shardwright.torch as sw
from shardwright.cluster import Cluster, Device, Link
from shardwright.run.context import context
from shardwright.testing import preload, run_ranks
from shardwright.torch.measuring import planning

ESTIMATED = {"microbatches": 4, "profile": "estimated"}
TENSOR = {**ESTIMATED, "tensor_parallel_degree": 2}
SHARDED = {
    "microbatches": 4,
    "profile": "estimated",
    "sharded_data_parallel_degree": 2,
    "plan_one_stage": True,
}
MODELS = (
    *("MLP", "ResNet", "TransformerEncoder", "LSTM", "calls one module twice", "dropout in blocks"),
    *("tied embeddings", "parameters in glue", "recomputes", "buffers in glue"),
    *("GPT-2", "BERT", "T5", "Mixtral"),
)
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "2 stages": (ESTIMATED, MODELS),
    "interleaved": ({**ESTIMATED, "pipeline": "interleaved_1f1b", "virtual_stages": 2}, ("MLP", "GPT-2")),
    "full recomputation": ({**ESTIMATED, "activation_checkpointing": "full"}, ("MLP", "GPT-2")),
    "tensor 2": (TENSOR, ("TransformerEncoder", "GPT-2", "BERT")),
    "shards 2": (SHARDED, ("MLP", "dropout in blocks", "GPT-2")),
}
# What differs from run to run.
VOLATILE = re.compile(r"(created|created_by|path|version|sha256|correction|(config|plan|state)\.json)$")


LINK = Link(latency_s=5e-5, bandwidth_Bps=1e9)
MACHINE = Cluster(
    device=Device(name="cpu", flops_per_s=5e10, memory_Bps=1e10, memory_bytes=2**33),
    ranks_per_node=2,
    cores_per_node=2,
    intra_node=LINK,
    inter_node=LINK,
)
"""Plans are made for this one: what links of the present one take differs from run to run."""


def digest(tensor: Any) -> str:
    whole = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    raw = whole.detach().contiguous().view(torch.uint8) if whole.numel() and whole.dim() else whole.detach()
    return hashlib.sha256(bytes(raw.cpu().numpy().tobytes())).hexdigest()[:16]


def settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: settled(each) for key, each in value.items() if not VOLATILE.search(key)}
    return [settled(each) for each in value] if isinstance(value, list) else value


def trained(recipe: Recipe, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two steps of one model on this rank."""
    warnings.simplefilter("ignore")
    planning.present_cluster = lambda *_: MACHINE  # type: ignore[assignment]
    planning.with_host_costs = lambda _, cluster: cluster  # type: ignore[assignment]
    sw.init({"run_dir": f"{folder}/run", **config})
    try:
        torch.manual_seed(0)
        model = sw.DistributedModel(recipe.build().to(recipe.dtype).train())
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        @sw.step
        def train(model: Any, batch: Any) -> torch.Tensor:
            loss = recipe.loss(model, batch)
            model.backward(loss)
            return loss

        found: dict[str, Any] = {"losses": [], "gradients": [], "parameters": {}}
        for number in range(2):
            torch.manual_seed(1000 + number)
            batch = recipe.batch(8, 12)
            batch = {
                name: item.to(recipe.dtype) if torch.is_tensor(item) and item.is_floating_point() else item
                for name, item in batch.items()
            }
            optimizer.zero_grad()
            losses = train(model, batch)
            found["losses"].append([float(loss) for loss in losses.outputs])
            gradients = {name: each.grad for name, each in model.local_named_parameters()}
            found["gradients"].append(
                {name: None if grad is None else digest(grad) for name, grad in gradients.items()}
            )
            optimizer.step()
        found["parameters"] = {name: digest(each) for name, each in model.local_named_parameters()}
        plan = context().plan
        found["plan"] = None if plan is None else settled(json.loads(plan.to_json()))
        sw.Checkpoints(f"{folder}/kept", signals=()).save(2, asynchronous=False)
        found["checkpoint"] = {
            str(path.relative_to(folder)): settled(json.loads(path.read_text()))
            for path in sorted(Path(folder, "kept").rglob("manifest.json"))
        }
        return found
    finally:
        sw.shutdown()


def all_trained(names: tuple[str, ...], config: dict[str, Any], folder: str) -> dict[str, Any]:
    return {name: trained(ZOO[name], config, f"{folder}/{number}") for number, name in enumerate(names)}


def golden() -> dict[str, Any]:
    every: dict[str, Any] = {}
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    for case, (config, names) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(all_trained, 2, names, config, folder, timeout_s=400, env=env)
            every[case] = json.loads(json.dumps(ranks))
    return every


def differing(before: Any, after: Any, where: str) -> list[str]:
    """What differs, by its place."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differing(before.get(key), after.get(key), f"{where}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for number, pair in pairs for line in differing(*pair, f"{where}/{number}")]
    return [] if before == after else [f"{where}: {str(before)[:80]} is now {str(after)[:80]}"]


def main() -> None:
    verb, file = sys.argv[1], Path(sys.argv[2])
    preload("warm_up", "transformers")
    found = golden()
    if verb == "write":
        file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} runs are in {file}")
        return
    lines = differing(json.loads(file.read_text()), found, "")
    print("\n".join(lines) or f"all {len(found)} runs are equal")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
