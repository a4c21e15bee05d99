"""Contexts in which modules are made, recomputation, and the modules and translators of ``smp.nn``."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from choices import some_combinations
from compat.small_models import FEATURES, QUIET, Net, batch, largest_difference, loss_of, net, plain_gradients
from shardwright.errors import CheckpointError, UsageError
from shardwright.testing import run_ranks
from smdistributed.modelparallel.torch.nn.huggingface import gpt2
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

CLOSE = 1e-12


class Placed(nn.Module):
    """Modules that are placed as they are created, the innermost wish last."""

    def __init__(self):
        super().__init__()
        with smp.partition(1):
            self.first = nn.Linear(FEATURES, 8)
            with smp.partition(0):
                self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.fourth = nn.Linear(8, 3)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x).tanh()).tanh()).tanh())


def placed(settings):
    smp.init({**QUIET, "partitions": 2, "microbatches": 2, **settings})
    torch.manual_seed(0)
    plain = Placed().double()
    smp.set_partition(plain.third, 1)
    expected = plain_gradients(plain, [batch(0)], microbatches=2)
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(model, x, y):
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    train_step(model, *batch(0))
    assert largest_difference(model, expected) < CLOSE
    return sorted({name.split(".")[0] for name, _ in model.local_named_parameters()})


def test_modules_go_where_the_script_places_them():
    found = run_ranks(placed, 2, {"auto_partition": False, "default_partition": 0})
    assert found == [["fourth", "second"], ["first", "third"]]


def test_placing_is_passed_over_where_the_library_places():
    first, second = run_ranks(placed, 2, {"auto_partition": True})
    assert "first" in first  # and not on the second rank, where the script wants it
    assert sorted(first + second) == ["first", "fourth", "second", "third"]


def test_a_script_that_places_for_two_stages_runs_with_one():
    """Partition 1 did not exist, although placing is passed over where the library places."""

    def alone():
        smp.init({**QUIET, "partitions": 1})
        plain = Placed()
        smp.set_partition(plain.third, 1)
        return hasattr(smp.DistributedModel(plain), "module")

    assert run_ranks(alone, 1) == [True]


def test_a_model_that_is_created_without_memory_trains_alike():
    def trained(by_setting):
        settings = {"delayed_parameter_initialization": True}
        smp.init({**QUIET, "partitions": 2, "microbatches": 2, **settings})
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, 3))
        torch.manual_seed(0)
        context = smp.model_creation()
        with context:
            plain = nn.Sequential(nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, 3))
        assert plain[0].weight.is_meta
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        x, y = batch(0)
        train_step(model, x.float(), y)
        state = model.state_dict()
        return all(torch.equal(state[name], value) for name, value in expected.state_dict().items())

    assert run_ranks(trained, 2, True) == [True] * 2


class ByHand(nn.Module):
    """Recomputes by hand: a module inside, and a sequence."""

    def __init__(self, strategy):
        super().__init__()
        torch.manual_seed(0)
        self.strategy = strategy
        self.inner = Net()
        self.last = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 3))
        self.calls = 0

    def forward(self, x):
        x = checkpoint(self.inner, x, preserve_rng_state=True)
        return checkpoint_sequential(self.last, x, strategy=self.strategy)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"), some_combinations(["each", "contiguous", "group_2"], [2, 1])
)
def test_modules_are_recomputed_by_hand(num_ranks, strategy):
    def trained(num_ranks, strategy):
        smp.init({**QUIET, "partitions": num_ranks, "microbatches": 2})
        plain = ByHand(strategy).double()
        expected = plain_gradients(plain, [batch(0)], microbatches=2)
        forwards = []
        plain.inner.head.register_forward_pre_hook(lambda *_: forwards.append(1))
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        train_step(model, *batch(0))
        return largest_difference(model, expected), len(forwards)

    found = run_ranks(trained, num_ranks, num_ranks, strategy)
    assert max(difference for difference, _ in found) < CLOSE
    if num_ranks == 1:
        assert found[0][1] == 4  # two microbatches, each once forward and once in its backward


@pytest.mark.parametrize("kind", ["module", "group_2"])
def test_modules_are_recomputed_by_a_strategy(kind):
    def trained(kind):
        smp.init({**QUIET, "partitions": 2, "microbatches": 2})
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)), nn.Linear(FEATURES, 3))
        plain = plain.double()
        target = plain[1] if kind == "module" else plain
        strategy = "each" if kind == "module" else kind
        with pytest.warns(UserWarning, match="one by one") if kind == "group_2" else nullcontext():
            smp.set_activation_checkpointing(target, preserve_rng_state=True, strategy=strategy)
        expected = plain_gradients(plain, [batch(0)], microbatches=2)
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        train_step(model, *batch(0))
        return largest_difference(model, expected)

    assert max(run_ranks(trained, 2, kind)) < CLOSE


def test_wrong_strategies_are_refused():
    with pytest.raises(UsageError, match="strategy 'group_0' is unknown"):
        smp.set_activation_checkpointing(nn.ModuleList([nn.Linear(2, 2)]), strategy="group_0")
    with pytest.raises(UsageError, match=r"strategy 'contiguous' is for nn\.Sequential"):
        smp.set_activation_checkpointing(nn.Linear(2, 2), strategy="contiguous")
    with pytest.warns(UserWarning, match="each is recomputed by itself"):
        smp.set_activation_checkpointing(nn.ModuleList([nn.Linear(2, 2)]), strategy="contiguous")


def test_a_scaler_goes_into_the_step():
    def scaled():
        smp.init({**QUIET, "partitions": 2, "microbatches": 2})
        plain = net()
        expected = plain_gradients(plain, [batch(0)], microbatches=2)
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        scaler = smp.amp.GradScaler(init_scale=2.0**8)

        @smp.step
        def train_step(model, scaler, x, y):
            loss = loss_of(model, x, y)
            model.backward(scaler.scale(loss))
            return loss

        train_step(model, scaler, *batch(0))
        scaler.unscale_(optimizer)
        difference = largest_difference(model, expected)
        scaler.step(optimizer)
        scaler.update()
        return difference, scaler.get_scale()

    found = run_ranks(scaled, 2)
    assert max(difference for difference, _ in found) < CLOSE
    assert [scale for _, scale in found] == [2.0**8] * 2


def attention(qkv, bias=None, *, factor):
    """Softmax over all scores, in the open."""
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    scores = query @ key.transpose(-1, -2) * factor
    return torch.softmax(scores if bias is None else scores + bias, -1) @ value


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(2, 5, 3, 4, 8, dtype=torch.float64)


def layer_of(**options):
    return smp.nn.FlashAttentionLayer(0.0, **options)


def causal(length):
    return torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)


def test_attention_is_softmax_of_scores(qkv):
    root = 1 / math.sqrt(8)
    mask = torch.randn(2, 1, 1, 5, dtype=torch.float64)
    for layer, factor in (
        (layer_of(), root),
        (layer_of(attention_head_size=8), root),
        (layer_of(scale_attention_scores=False), 1.0),
        (layer_of(scale=0.5), 0.5),
        (layer_of(scale_attn_by_layer_idx=True, layer_idx=3), root / 4),
    ):
        assert layer(qkv).shape == (2, 4, 5, 8)
        assert torch.allclose(layer(qkv), attention(qkv, factor=factor))
        assert torch.allclose(layer(qkv, mask), attention(qkv, mask, factor=factor))
        assert torch.allclose(layer(qkv, causal=True), attention(qkv, causal(5), factor=factor))
        assert torch.allclose(layer(qkv, mask, True), attention(qkv, mask + causal(5), factor=factor))


def test_wrong_attention_is_refused(qkv):
    for call, text in (
        (lambda: smp.nn.FlashAttentionLayer(1.5), "attention_dropout_prob is 1.5"),
        (lambda: layer_of(scale_attn_by_layer_idx=True), "layer_idx is not given"),
        (lambda: layer_of()(qkv[:, :, 0]), "must be"),
        (lambda: layer_of(attention_head_size=4)(qkv), "heads of qkv have 8"),
    ):
        with pytest.raises(UsageError, match=text):
            call()


def test_states_that_cannot_be_translated_are_refused():
    state = {"transformer.seq_layers.0.attention.query.weight": torch.ones(2, 2)}
    missing = "attn.c_attn.weight is made from .*seq_layers.0.attention.key.weight is not there"
    with pytest.raises(UsageError, match=missing):
        gpt2.translate_state_dict_to_hf_gpt2(state)
    with pytest.raises(UsageError, match=r"h\.3\.adapter has no place in a distributed layer"):
        gpt2.translate_hf_state_dict_to_smdistributed_gpt2({"transformer.h.3.adapter": torch.ones(2)})
    with pytest.raises(UsageError, match=r"seq_layers\.3\.adapter has no place in a layer of Hugging Face's"):
        gpt2.translate_state_dict_to_hf_gpt2({"transformer.seq_layers.3.adapter": torch.ones(2)})
    with pytest.raises(UsageError, match="max_seq_len is 0"):
        gpt2.translate_state_dict_to_hf_gpt2({}, max_seq_len=0)
    with pytest.raises(UsageError, match="is a dictionary, not a list"):
        gpt2.translate_state_dict_to_hf_gpt2([])


def test_a_model_is_written_down_and_compared(tmp_path):
    def compared():
        from smdistributed.modelparallel.test.torch.utils import dump_model, verify

        smp.init({**QUIET, "partitions": 2, "microbatches": 2})
        plain = net()
        untrained = copy.deepcopy(plain)
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        train_step(model, *batch(0))
        path = tmp_path / "folder" / "dump.pt"
        dump_model(model, path, losses=[1.0])
        smp.barrier()
        verify(model, path, losses=[1.0])
        verify(untrained, path)
        with pytest.raises(CheckpointError, match=r"1 of 7 tensors differ .*losses"):
            verify(untrained, path, losses=[2.0])
        with torch.no_grad():
            untrained.head.bias += 1
        with pytest.raises(CheckpointError, match=r"1 of 6 tensors differ .*head\.bias"):
            verify(untrained, path)
        with pytest.raises(CheckpointError, match="other names"):
            verify(nn.Linear(2, 2), path)
        with pytest.raises(CheckpointError, match="there is no"):
            verify(untrained, tmp_path / "none.pt")
        torch.save({"model": untrained}, tmp_path / f"pickled{smp.rank()}.pt")
        with pytest.raises(CheckpointError, match="Nothing of it was run"):
            verify(untrained, tmp_path / f"pickled{smp.rank()}.pt")
        return True

    assert run_ranks(compared, 2) == [True] * 2
