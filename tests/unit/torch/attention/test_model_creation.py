"""`sw.model_creation`: models with routed attention compute what plain ones do, and keep no scores."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.torch.attention.hugging_face import attention_table, kernels_of
from shardwright.torch.attention.kernels import Choice
from six_models import SIX, build

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

# These two know no other attention, so that nobody has to choose it; the others take PyTorch's by default.
ONLY_EAGER = ("GPT-J", "GPT-Neo")
LENGTH = 24


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch):
    """Some models compute scores or a softmax in float32, whatever their type: here it is their type."""
    transformers.logging.set_verbosity_error()

    def finfo(dtype: torch.dtype) -> Any:
        """GPT-Neo's scores are float32 where it writes their lowest number."""
        return torch.finfo(torch.float32)

    for name in (
        "gptj.modeling_gptj",
        "gpt_neo.modeling_gpt_neo",
        "gpt_neox.modeling_gpt_neox",
        "codegen.modeling_codegen",
    ):
        module = __import__(f"transformers.models.{name}", fromlist=["torch"])
        names = {key: value for key, value in vars(torch).items() if key != "float32"}
        names |= {"float32": torch.float64, "finfo": finfo}
        monkeypatch.setattr(module, "torch", SimpleNamespace(**names))


def eager(name: str, **more: Any) -> Any:
    chosen = {} if name in ONLY_EAGER else {"attn_implementation": "eager"}
    torch.manual_seed(0)
    return build(name, **chosen, **more).double()


def routed(name: str, *, flash_attention: bool | None = True, **more: Any) -> Any:
    torch.manual_seed(0)
    with sw.model_creation(flash_attention=flash_attention):
        return build(name, **more).double()


def tokens(length: int = LENGTH, samples: int = 3) -> Tensor:
    return torch.randint(3, 96, (samples, length), generator=torch.Generator().manual_seed(1))


def padding(*, left: bool) -> Tensor:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, slice(None, 7) if left else slice(-7, None)] = 0
    return mask


def pairs(*, allowed: Tensor) -> Tensor:
    """(3, 1, Q, K), as a script may pass it: numbers that are added to the scores."""
    lowest = torch.finfo(torch.float64).min
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, lowest).expand(3, 1, -1, -1)


MASKS = {
    "none": None,
    "right": padding(left=False),
    "left": padding(left=True),
    "pairs": pairs(allowed=torch.rand(1, 1, LENGTH, LENGTH).tril() + torch.eye(LENGTH) > 0.3),
}


def outcome(model: Any, mask: Tensor | None, **more: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss over the positions that are no padding, their logits, gradients."""
    ids = tokens()
    kept = torch.ones_like(ids) if mask is None or mask.dim() == 4 else mask
    result = model(ids, attention_mask=mask, labels=ids.masked_fill(kept == 0, -100), **more)
    result.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return result.loss.detach(), result.logits[kept == 1].detach(), gradients


def assert_same(found: Any, wanted: Any) -> None:
    loss, logits, gradients = found
    torch.testing.assert_close(loss, wanted[0], rtol=0, atol=1e-6)  # transformers: in float32
    torch.testing.assert_close(logits, wanted[1], rtol=0, atol=1e-12)
    assert len(gradients) == len(wanted[2])
    for one, other in zip(gradients, wanted[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)  # from logits that were cast to float32


MASKS["numbers"] = MASKS["pairs"] + torch.linspace(-2, 2, LENGTH, dtype=torch.float64)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SIX)
def test_results_are_those_of_eager_attention(name, mask):
    plain, fused = eager(name), routed(name)
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert repr(plain) == repr(fused)
    fused.load_state_dict(plain.state_dict())
    assert_same(outcome(fused, MASKS[mask]), outcome(plain, MASKS[mask]))
    assert all(choice.kernel in ("flash", "blockwise") for choice in kernels_of(fused).values())
    assert len(kernels_of(fused)) == 4


def kept_bytes(model: Any, length: int) -> int:
    return kept_of(model, lambda: model.base_model(tokens(length, 1)))


def kept_of(model: nn.Module, run: Callable[[], Any]) -> int:
    """What a forward keeps, without parameters and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        result = run()
    del result
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("GPT-2", 0.0), ("BERT", 0.1), ("GPT-NeoX", 0.1)],
)
def test_kept_bytes_grow_linearly(name, dropout):
    fused = routed(name, positions=2048, dropout=dropout).float().train()
    short, long = kept_bytes(fused, 128), kept_bytes(fused, 2048)
    assert long / short < 16.3
    plain = eager(name, positions=2048, dropout=dropout).float().train()
    assert kept_bytes(plain, 1024) / kept_bytes(plain, 128) > 11


@pytest.mark.parametrize("name", SIX)
def test_an_explicit_implementation_is_honoured(name):
    model = routed(name, attn_implementation="eager")
    model(tokens())
    assert model.config._attn_implementation == "eager"
    assert set(kernels_of(model).values()) == {Choice("eager", "attn_implementation='eager'")}
    assert kept_bytes(model.float(), 64) == kept_bytes(eager(name).float(), 64)


@pytest.mark.parametrize("name", SIX)
def test_false_gives_plain_attention(name):
    model = routed(name, flash_attention=False, positions=128)
    assert_same(outcome(model, MASKS["right"]), outcome(eager(name, positions=128), MASKS["right"]))
    assert set(kernels_of(model).values()) == {Choice("plain", "flash_attention=False")}
    short, long = (kept_bytes(model.float(), length) for length in (16, 128))
    assert long > 9 * short


def test_a_model_whose_attention_is_not_routed_stays_as_it_is():
    """CodeGen computes its scores by itself, in a way of its own."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": 96}
    results = []
    for flash_attention in (None, True, False):
        torch.manual_seed(0)
        with sw.model_creation(flash_attention=flash_attention):
            model = transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**sizes)).eval()
        results.append(model(tokens(), attention_mask=padding(left=False)).logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert attention_table(model) == ""


@pytest.mark.parametrize("name", SIX)
def test_weights_that_are_asked_for_come_from_plain_attention(name, caplog, monkeypatch):
    from shardwright.torch.attention import hugging_face

    monkeypatch.setattr(hugging_face._Said, "already", False)
    plain, fused = eager(name), routed(name)
    for mask in (None, padding(left=False)):
        wanted = plain(tokens(), attention_mask=mask, output_attentions=True)
        found = fused(tokens(), attention_mask=mask, output_attentions=True)
        assert len(found.attentions) == len(wanted.attentions) == 4
        for one, other in zip(found.attentions, wanted.attentions, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert set(kernels_of(fused).values()) == {Choice("eager", "its weights are asked for")}
    assert caplog.text.count("attention weights are asked for") == 1
    fused(tokens())
    assert "eager" not in attention_table(fused)


@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "GPT-Neo", "GPT-NeoX"])
def test_generation_with_a_cache(name):
    plain, fused = eager(name).eval(), routed(name).eval()
    more = {"max_new_tokens": 12, "do_sample": False, "attention_mask": padding(left=True)}
    assert torch.equal(plain.generate(tokens(), **more), fused.generate(tokens(), **more))


def test_recomputation_takes_the_same_kernel():
    gradients = []
    for recomputes in (False, True):
        model = routed("GPT-Neo", dropout=0.1).train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))


def trained(model: Any, steps: int) -> list[Tensor]:
    """Losses of a run of one rank."""
    sw.init({"run_dir": "off", "profile": "estimated"})
    try:
        wrapped = sw.DistributedModel(model)

        @sw.step
        def train(model, ids):
            loss = model(ids, labels=ids).loss
            model.backward(loss)
            return loss

        return [train(wrapped, tokens()).reduce_mean() for _ in range(steps)]
    finally:
        sw.shutdown()


@pytest.mark.parametrize("name", ["BERT", "GPT-J"])
def test_with_delayed_initialisation(name):
    torch.manual_seed(0)
    with sw.delay_param_initialization(), sw.model_creation():
        model = build(name)
    (found,) = trained(model, 1)
    wanted = eager(name).float()(tokens(), labels=tokens()).loss
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-5)
    assert len(kernels_of(model)) == 4


def test_the_first_training_step_prints_the_table(capfd):
    model = routed("BERT", dropout=0.1)
    trained(model, 2)
    printed = "".join(capfd.readouterr())
    assert printed.count("blockwise  dropout on a CPU") == 1


class CallsAttention(nn.Module):
    """As many scripts write it."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.packed = nn.Linear(16, 48)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = self.packed(x).view(samples, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        result = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return result.transpose(1, 2).flatten(2)


def encoder(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("make", [CallsAttention, encoder])
def test_modules_of_pytorch_are_routed(make):
    torch.manual_seed(0)
    plain = make(0.0).double()
    with sw.model_creation():
        fused = make(0.0).double()
        dropping = make(0.1)
    fused.load_state_dict(plain.state_dict())
    assert repr(fused) == repr(plain)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    for model in (plain, fused):
        model(x).square().sum().backward()
    torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=1e-12)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-11)
    dropping(x.float())
    assert set(kernels_of(fused).values()) == {Choice("flash")}
    assert set(kernels_of(dropping).values()) == {Choice("blockwise", "dropout on a CPU")}
    short, long = (
        kept_of(dropping, lambda n=length: dropping(torch.randn(1, n, 16))) for length in (64, 1024)
    )
    assert long / short < 16.3


def test_a_trace_for_accelerators_has_their_fused_kernel():
    """Dropout of attention makes our own kernel necessary on a CPU, and not where the model will train."""
    ids = tokens()
    plain = build("BERT", dropout=0.1)
    graphs = [
        sw.trace_model(model, ids, labels=ids, on_accelerators=True)
        for model in (plain, routed("BERT", dropout=0.1).float())
    ]
    costs = [[(node.name, node.flops, node.saved_bytes) for node in graph.nodes] for graph in graphs]
    assert costs[0] == costs[1]
