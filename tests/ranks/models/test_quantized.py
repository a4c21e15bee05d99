"""Base weights in 4 or 8 bits stay as they are on any number of ranks, and adapters train beside them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import Kept, batch, llama, loss_of, optimizer_of, train_each, with_adapter
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

PLANS = {
    "stages": {"pipeline_parallel_degree": 2},
    "shards": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1},
    "replicas": {"pipeline_parallel_degree": 1},
}
LIMIT = 1e-4


class Bytes(Tensor):
    """A weight of which each row has numbers of 8 bits, and a scale."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Bytes":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, shape: Any, stride: Any) -> "Bytes":
        return Bytes(parts["codes"], parts["scale"])

    @classmethod
    def of(cls, weight: Tensor) -> "Bytes":
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            given, weight, *bias = args
            return func(given, weight.codes.to(weight.scale.dtype) * weight.scale, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("detach.default", "alias.default"):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of {cls.__name__}")


def layers_of(base: nn.Module) -> list[tuple[str, nn.Linear]]:
    found = [(name, each) for name, each in base.named_modules() if isinstance(each, nn.Linear)]
    return [(name, each) for name, each in found if name != "lm_head"]


def in_bytes() -> Any:
    base = llama()
    for _, layer in layers_of(base):
        layer.weight = nn.Parameter(Bytes.of(layer.weight), requires_grad=False)
    return with_adapter(base)


def by_torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = llama().requires_grad_(False)
    quantize_(
        base,
        Int8WeightOnlyConfig(),
        filter_fn=lambda m, name: isinstance(m, nn.Linear) and m.bias is None and name != "lm_head",
    )
    return with_adapter(base)


def by_bitsandbytes(*, twice: bool = True) -> Any:
    """In 4 bits (NF4), with scales that are quantized themselves."""
    import bitsandbytes as bnb

    base = llama()
    for name, layer in layers_of(base):
        sizes = layer.in_features, layer.out_features
        made = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compress_statistics=twice)
        made.load_state_dict(layer.state_dict())
        above, _, own = name.rpartition(".")
        setattr(base.get_submodule(above), own, made.to("cpu"))
    base.is_loaded_in_4bit = True  # as from_pretrained has it: PEFT looks at this
    return with_adapter(base)


def described(plain: Any, model: Any) -> dict[str, Any]:
    """What this rank keeps of the base weights."""
    kept = [each for name, each in model.local_named_parameters() if "weight_parts" in name]
    return {
        "types": sorted({str(each.dtype) for each in kept}),
        "bytes": sum(getattr(each, "local", each).nbytes for each in kept),
        "frozen": all(each.grad is None and not each.requires_grad for each in kept),
    }


def trained(build: Any) -> list[dict[str, Kept]]:
    env = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    kept = run_ranks(
        train_each, 2, {n: (build, s) for n, s in PLANS.items()}, described, timeout_s=300, env=env
    )
    for plan in PLANS:
        own = [each[plan] for each in kept]
        assert max(each["gradients"] for each in own) < LIMIT
        assert max(each["weights"] for each in own) < LIMIT
        losses = torch.tensor([each["losses"] for each in own]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(own[0]["expected"]), rtol=LIMIT, atol=LIMIT)
        assert all(each["then"]["frozen"] for each in own)
    return kept


def test_weights_of_any_class_are_kept_as_their_parts() -> None:
    """Each stage has its own; each shard has rows of the numbers and of the scales."""
    kept = trained(in_bytes)
    of = {plan: [each[plan]["then"] for each in kept] for plan in PLANS}
    assert of["replicas"][0]["types"] == ["torch.float32", "torch.int8"]
    whole = of["replicas"][0]["bytes"]
    assert sum(each["bytes"] for each in of["stages"]) == whole
    assert sum(each["bytes"] for each in of["shards"]) == whole
    assert max(each["bytes"] for each in of["shards"]) < 0.6 * whole


def test_weights_of_torchao() -> None:
    pytest.importorskip("torchao")
    kept = trained(by_torchao)
    assert "torch.int8" in kept[0]["stages"]["then"]["types"]


def test_weights_of_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    kept = trained(by_bitsandbytes)
    assert kept[0]["stages"]["then"]["types"] == ["torch.float32", "torch.uint8"]


def refusal(build: Any, settings: dict[str, Any]) -> str:
    """What a model is refused with."""
    sw.init({"run_dir": "off", **settings})
    try:
        sw.DistributedModel(build())
    except UsageError as error:
        return str(error)
    finally:
        sw.shutdown()
    return ""


def trained_bytes() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(Bytes.of(layer.weight), requires_grad=True)
    return layer


@pytest.mark.parametrize(
    ("build", "settings", "remedy"),
    [
        (in_bytes, {"tensor_parallel_degree": 2}, "Use pipeline_parallel_degree or"),
        (in_bytes, {"bf16": True}, r"Cast the model before it is quantized: model\.to\(torch\.bfloat16\)"),
        (trained_bytes, {}, r"Freeze it with requires_grad_\(False\)"),
    ],
)
def test_what_would_cut_cast_or_train_them_is_refused(build: Any, settings: Any, remedy: str) -> None:
    (first, *_) = run_ranks(refusal, 2, build, settings, timeout_s=60)
    assert first
    assert re.search(remedy, first)


def loads_of_before(settings: dict[str, Any]) -> tuple[float, float, str]:
    """Losses of a model, and of another one that has taken its state; what plain weights are refused with."""
    sw.init({"run_dir": "off", "microbatches": 2, "profile": "estimated", **settings})

    @sw.step
    def train(model: Any, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    torch.manual_seed(5)
    before = in_bytes()
    state = before.state_dict()
    with torch.no_grad():
        expected = loss_of(before.eval(), batch(0)).item()
    other = in_bytes()
    for _, layer in layers_of(other):
        if isinstance(layer.weight, Bytes):
            layer.weight.codes.zero_()
    model = sw.DistributedModel(other)
    refused = ""
    try:
        model.load_state_dict({name: torch.zeros(1) for name in state})
    except UsageError as error:
        refused = str(error)
    model.load_state_dict(state)
    found = train(model, batch(0)).reduce_mean().item()
    model.load_state_dict(state)
    sw.shutdown()
    return found, expected, refused


def test_a_state_from_before_the_model_was_wrapped_is_loaded() -> None:
    for found, expected, refused in run_ranks(loads_of_before, 2, PLANS["stages"], timeout_s=120):
        assert found == pytest.approx(expected, rel=LIMIT)
        assert "which is quantized, and the state has it as Tensor. Load the state before" in refused


def resumed(folder: str, settings: dict[str, Any], steps: int) -> list[float]:
    """The losses of some steps behind a checkpoint, which there may be; leaves one."""
    sw.init({"run_dir": "off", "microbatches": 2, "profile": "estimated", **settings})
    try:
        model = sw.DistributedModel(in_bytes())
        optimizer = sw.DistributedOptimizer(optimizer_of(model))
        checkpoints = sw.Checkpoints(folder, asynchronous=False, signals=())

        @sw.step
        def train(model: Any, ids: Tensor) -> Tensor:
            loss = loss_of(model, ids)
            model.backward(loss)
            return loss

        first, losses = checkpoints.resume(), []
        for step in range(first, first + steps):
            optimizer.zero_grad()
            losses.append(train(model, batch(step)).reduce_mean().item())
            optimizer.step()
        checkpoints.save(first + steps)
        checkpoints.close()
        return losses
    finally:
        sw.shutdown()


def test_a_run_resumes_with_other_degrees(tmp_path: Path) -> None:
    """Two steps on two stages and two more on one rank are four steps on one rank."""
    apart = [
        *run_ranks(resumed, 2, tmp_path / "apart", {"pipeline_parallel_degree": 2}, 2, timeout_s=120)[0],
        *run_ranks(resumed, 1, tmp_path / "apart", {}, 2, timeout_s=120)[0],
    ]
    (together,) = run_ranks(resumed, 1, tmp_path / "together", {}, 4, timeout_s=120)
    assert apart == pytest.approx(together, rel=1e-4)
