"""`optimizer_state`: moments in bfloat16 or in 8 bits, over stages, shards, replicas and tensor degrees."""

from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from checkpointed import training
from sharded import QUIET, Net, batches, loss_of, optimizer_of
from torch import Tensor, nn

import shardwright.torch as sw
from choices import thorough
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS = {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 1}
REPLICAS = {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}
TENSOR = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
KINDS = ("bf16", "8bit")


class Whole(nn.Module):
    """Rows of whole blocks, and nothing tied: what ranks share of a weight has the blocks of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def trained(
    settings: dict[str, Any], *, whole: bool = False, optimizer: str = "AdamW", **options: Any
) -> Any:
    """Losses, weights, kinds of moments and bytes of an element, and the state in names of parameters.

    Pieces are of two blocks.
    """
    import shardwright.torch.optimizer.packing as packing
    from shardwright.torch.optimizer.packed_tensor import PackedTensor, memory_of_moment
    from shardwright.torch.tensor_parallel.divided_tensor import local_of

    packing._PIECE = 512
    if "host" in options:
        import shardwright.torch.replicas.replicas as replicas

        # No machine with an accelerator is needed for the copies, which are apart from the parameters.
        replicas.updates_on_host = lambda _: options["host"]
    sw.init({**QUIET, "microbatches": 2, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel((Whole() if whole else Net()).to(options.get("dtype", torch.float64)))
    updates = sw.DistributedOptimizer(optimizer_of(optimizer, model))

    for group in updates.param_groups if options.get("host") is False else ():
        group["fused"] = True  # as it is in the host's memory

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    losses = []
    for x, y in batches(5):
        own = slice(sw.rdp_rank(), None, sw.rdp_size())
        updates.zero_grad()
        losses.append(train(model, x[own], y[own]).reduce_mean().item())
        updates.step()
    moments = [local_of(v) for values in updates.state.values() for v in values.values() if v.dim()]
    kinds = {m.kind for m in moments if isinstance(m, PackedTensor)}
    num_bytes = sum(part.nbytes for moment in moments for part in memory_of_moment(moment))
    names = updates.live_state_dict()["parameter_names"]
    state = {names[number]: values for number, values in updates.state_dict()["state"].items()}
    return losses, model.state_dict(), kinds, num_bytes / sum(map(torch.numel, moments)), state


@cache
def of_one_rank(kind: str, whole: bool) -> Any:
    return run_ranks(trained, 1, {"optimizer_state": kind}, whole=whole)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_bits_of_one_rank(kind: str) -> None:
    plain, (losses, weights, kinds, of_element, state) = of_one_rank("as_is", True), of_one_rank(kind, True)
    assert kinds == ({"bf16"} if kind == "bf16" else {"signed", "unsigned"})
    assert of_element == (2 if kind == "bf16" else 1 + 4 / 256)
    assert losses[:2] == plain[0][:2], "moments are rounded behind the first update"
    assert losses != plain[0]
    assert losses == pytest.approx(plain[0], rel=1e-3 if kind == "bf16" else 2e-2)
    assert {m.dtype for values in state.values() for m in values.values() if m.dim()} == {torch.float64}
    for own, final, _, _, of_stage in run_ranks(trained, 2, {**STAGES, "optimizer_state": kind}, whole=True):
        assert own == losses
        assert all(torch.equal(value, weights[name]) for name, value in final.items())
        for name, values in of_stage.items():
            assert all(torch.equal(value, state[name][key]) for key, value in values.items()), name


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bf16", SHARDS),
        thorough("bf16", REPLICAS),
        ("bf16", TENSOR),
        thorough("bf16", STAGES),
        thorough("8bit", SHARDS),
        ("8bit", REPLICAS),
    ],
)
def test_values_are_rounded_alike_on_all_layouts(kind: str, settings: dict[str, Any]) -> None:
    """Sums over ranks differ by 1e-16; 8 bits are the same where blocks are."""
    whole = kind == "8bit"
    _, weights, kinds, _, _ = of_one_rank(kind, whole)
    for _, final, own, _, _ in run_ranks(trained, 2, {**settings, "optimizer_state": kind}, whole=whole):
        assert own == kinds
        torch.testing.assert_close(final, weights, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("settings", [TENSOR, thorough({**TENSOR, **SHARDS}), thorough(SHARDS)])
def test_other_blocks_are_about_the_same(settings: dict[str, Any]) -> None:
    """Of tied and odd sizes: each rank has blocks of its own part."""
    _, weights, kinds, _, _ = of_one_rank("8bit", False)
    ranks = 4 if len(settings) == 3 else 2
    for _, final, own, _, _ in run_ranks(trained, ranks, {**settings, "optimizer_state": "8bit"}):
        assert own == kinds
        assert max(float((final[name] - weights[name]).abs().max()) for name in weights) < 0.03


def with_updates_on_the_host(*args: Any, **options: Any) -> Any:
    import shardwright.torch.replicas.replicas as replicas

    replicas.updates_on_host = lambda _: True
    return training(*args, **options)


@pytest.mark.parametrize(
    ("settings", "ranks", "options"),
    [
        ({"optimizer_state": "8bit", **STAGES}, 2, {}),
        thorough({"optimizer_state": "bf16", **SHARDS, "bf16": True}, 2, {"dtype": torch.float32}),
        thorough({"optimizer_state": "8bit", **REPLICAS, "fp16": True}, 2, {"dtype": torch.float32}),
        thorough({"optimizer_state": "8bit", "seed": 3}, 1, {"optimizer": "SGD"}),
        thorough({"optimizer_state": "bf16", **TENSOR}, 2, {"optimizer": "RMSprop"}),
        thorough({"offload_optimizer": True, **STAGES, "bf16": True}, 2, {"dtype": torch.float32}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    settings: dict[str, Any], ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    run = with_updates_on_the_host if "offload_optimizer" in settings else training
    whole = run_ranks(run, ranks, settings, tmp_path / "whole", until=6, **options)
    plan = tmp_path / "whole" / "step-00000003" / "plan.json"  # planning anew may choose another one
    first = {**settings, "plan": str(plan)} if plan.exists() else settings
    run_ranks(run, ranks, first, tmp_path / "cut", until=3, **options)
    rest = run_ranks(run, ranks, settings, tmp_path / "cut", until=6, first=3, **options)
    for (losses, state, _), (later, final, _) in zip(whole, rest, strict=True):
        assert later == losses[3:]
        assert all(torch.equal(final[n], v) for n, v in state.items() if isinstance(v, Tensor))


@pytest.mark.parametrize(
    ("kind", "saves", "resumes"),
    [("bf16", STAGES, SHARDS), thorough("8bit", SHARDS, TENSOR), thorough("bf16", TENSOR, REPLICAS)],
)
def test_other_degrees_go_on(
    kind: str, saves: dict[str, Any], resumes: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "optimizer": "AdamW"}
    setting = {"optimizer_state": kind}
    losses = run_ranks(training, 1, setting, tmp_path / "whole", until=6, **options)[0][0]
    run_ranks(training, 2, {**setting, **saves}, tmp_path / "cut", until=3, **options)
    for kept, on in (("as_is", {}), (kind, resumes)):
        settings = {"optimizer_state": kept, **on}
        ranks = 2 if on else 1
        folder = tmp_path / "cut" if on else tmp_path / "copy"
        if not on:
            copytree(tmp_path / "cut", folder)
        for later, _, _ in run_ranks(training, ranks, settings, folder, until=6, first=3, **options):
            rel = 1e-9 if kind == kept == "bf16" else 1e-3 if kind == "bf16" else 2e-2
            assert later == pytest.approx(losses[3:], rel=rel)


def scaled() -> tuple[list[float], list[float]]:
    """Losses with PyTorch's own scaler, with and without an overflow in between."""
    found = []
    for overflows in (False, True):
        sw.init({**QUIET, "optimizer_state": "8bit", "on_nonfinite": "ignore"})
        torch.manual_seed(0)
        model = sw.DistributedModel(Net())
        updates = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        @sw.step
        def train(model: Any, x: Tensor, y: Tensor, scaler: Any = scaler) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(scaler.scale(loss))
            return loss

        losses = []
        for number, (x, y) in enumerate(batches(4)):
            updates.zero_grad()
            losses.append(train(model, x, y).reduce_mean().item())
            if overflows and number == 1:
                next(model.parameters()).grad.fill_(torch.inf)
            scaler.step(updates)
            scaler.update()
        found.append(losses)
        sw.shutdown()
    return found[0], found[1]


def test_a_scaler_leaves_an_update_out() -> None:
    ((plain, left_out),) = run_ranks(scaled, 1)
    assert plain[:2] == left_out[:2]
    assert plain[2] != left_out[2]
    assert all(map(torch.isfinite, map(torch.tensor, left_out)))


def refused(optimizer: str, options: dict[str, Any], *, wrapped: bool = True) -> None:
    try:
        _refused(optimizer, options, wrapped)
    finally:
        sw.shutdown()


def _refused(optimizer: str, options: dict[str, Any], wrapped: bool) -> None:
    sw.init({**QUIET, "optimizer_state": "8bit"})
    model = sw.DistributedModel(Net())
    updates: Any = getattr(torch.optim, optimizer)(model.parameters(), **options)
    if wrapped:
        sw.DistributedOptimizer(updates)
        return

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(loss_of(model, x, y))

    train(model, *batches(1)[0])
    updates.step()


@pytest.mark.parametrize(
    ("optimizer", "options", "text"),
    [
        ("Adagrad", {}, "Adagrad is not known to be one. Set optimizer_state to as_is, or use"),
        ("Adafactor", {}, "optimizer_state is 8bit, which keeps the averages of optimizers"),
        ("AdamW", {"capturable": True}, "or leave capturable out"),
        ("RMSprop", {"centered": True}, "or leave centered out"),
    ],
)
def test_refused(optimizer: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        refused(optimizer, options)


def test_an_optimizer_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Call step\(\) of sw.DistributedOptimizer"):
        refused("AdamW", {}, wrapped=False)


def test_on_cpus_the_hosts_memory_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    sw.init({**QUIET, "offload_optimizer": True})
    try:
        assert sw.DistributedModel(Net()).replicas.updated_parts is None
        assert "offload_optimizer changes nothing on CPUs" in caplog.text
    finally:
        sw.shutdown()


def asked_in_hooks() -> list[tuple[list[list[str]], list[float]]]:
    """Keys of the state of the first parameter, before and after each update; and without hooks."""
    found = []
    for hooked in (True, False):
        sw.init({**QUIET, "optimizer_state": "8bit", "microbatches": 1})
        torch.manual_seed(0)
        model = sw.DistributedModel(Net().double())
        updates = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        seen: list[Any] = []

        def look(_: Any, *__: Any, of: Any = updates, seen: list[Any] = seen) -> None:
            state = of.state_dict()
            seen.append(sorted(state["state"].get(0, ())))

        if hooked:
            updates.optimizer.register_step_pre_hook(look)
            updates.optimizer.register_step_post_hook(look)

        @sw.step
        def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(loss)
            return loss

        losses = []
        for x, y in batches(2):
            updates.zero_grad()
            losses.append(train(model, x, y).reduce_mean().item())
            updates.step()
        found.append((seen, losses))
        sw.shutdown()
    return found


def test_a_hook_of_a_step_sees_the_state_of_parameters() -> None:
    (((seen, losses), (_, expected)),) = run_ranks(asked_in_hooks, 1)
    assert seen == [[], *[["exp_avg", "exp_avg_sq", "step"]] * 3]
    assert losses == expected


def test_a_moment_is_not_changed_in_place() -> None:
    """What scripts read of it is what it stands for; a change would be lost."""
    import shardwright.torch.optimizer.packed_tensor as packed

    moment = packed.PackedTensor.empty(torch.ones(3), "bf16", torch.device("cpu"))
    moment.write(0, torch.tensor([0.0, 1.5, -2.0]), salt=5)
    assert moment.tolist() == [0.0, 1.5, -2.0] == (moment * 1).tolist()
    with pytest.raises(UsageError, match="Assign what it is to be"):
        moment.zero_()


@pytest.mark.parametrize(
    ("settings", "ranks", "options"),
    [
        ({}, 1, {}),
        ({**STAGES, "bf16": True}, 2, {"dtype": torch.float32}),
        thorough({**SHARDS, "optimizer_state": "8bit"}, 2, {"dtype": torch.float32}),
        ({**REPLICAS, "optimizer_state": "bf16"}, 2, {}),
        thorough({**TENSOR, "fp16": True}, 2, {"dtype": torch.float32}),
        thorough({**TENSOR, **SHARDS}, 4, {"optimizer": "Adam"}),
    ],
)
def test_updates_in_the_hosts_memory_are_the_same(
    settings: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    """Copies of parameters are updated and written back (`offload_optimizer`); CPUs do without."""
    there, here = (run_ranks(trained, ranks, settings, host=host, **options) for host in (True, False))
    for (losses, weights, _, _, state), (plain, expected, _, _, moments) in zip(there, here, strict=True):
        assert losses == plain
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        torch.testing.assert_close(state, moments, rtol=0, atol=0)
