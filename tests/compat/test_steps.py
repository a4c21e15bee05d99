"""Step functions of smp: what is cut, what comes back, and that training is plain training."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from choices import some_combinations
from compat.small_models import FEATURES, QUIET, batch, largest_difference, loss_of, net, plain_gradients
from shardwright.testing import run_ranks

CLOSE = 1e-12


def trained(settings, *, called=False, size=8, dummy="same", average=True):
    """Difference of gradients to those of a loop in one process, and of the mean loss."""
    smp.init({**QUIET, "ddp": True, "microbatches": 4, **settings})
    plain = net()
    batches = [batch(0, replica, size=size) for replica in range(smp.dp_size())]
    expected = plain_gradients(plain, batches, microbatches=4, average=average)
    model = smp.DistributedModel(plain, average_grads_across_microbatches=average)

    def train_step(model, x, y, args):
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    decorated = smp.step()(train_step) if called else smp.step(train_step)
    x, y = batch(0, smp.dp_rank(), size=size)
    if smp.mp_rank():
        # What data pipelines of the GPT scripts feed there.
        x, y = {"same": (x, y), "empty": (x[:, :0], y[:0]), "none": (None, None)}[dummy]
    output = decorated(model, x, y, SimpleNamespace(option=1))
    assert len(output.outputs) == 4
    return largest_difference(model, expected), output.reduce_mean().item()


@pytest.mark.parametrize(("pipeline", "num_ranks"), some_combinations(["simple", "interleaved"], [1, 2, 4]))
def test_gradients_are_those_of_plain_training(num_ranks, pipeline):
    settings = {"partitions": min(num_ranks, 2), "pipeline": pipeline}
    found = run_ranks(trained, num_ranks, settings, called=pipeline == "simple")
    assert max(difference for difference, _ in found) < CLOSE
    replicas = {loss for _, loss in found}
    assert len(replicas) == max(1, num_ranks // 2)


def test_only_the_first_rank_of_a_replica_has_to_have_the_batch():
    found = run_ranks(trained, 2, {"partitions": 2}, dummy="none")
    assert max(difference for difference, _ in found) < CLOSE


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_of_microbatches_may_be_summed(num_ranks):
    found = run_ranks(trained, num_ranks, {"partitions": num_ranks}, average=False)
    assert max(difference for difference, _ in found) < CLOSE


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1},
        {"partitions": 1, "shard_optimizer_state": True},
        # The original refuses both together.
        {
            "partitions": 1,
            "sharded_data_parallel_degree": 2,
            "shard_optimizer_state": True,
            "sdp_param_persistence_threshold": 1,
        },
        {"placement_strategy": "spread", "partitions": 2, "active_microbatches": 2},
    ],
)
def test_other_settings_train_alike(settings):
    def gradients_and_update(settings):
        smp.init({**QUIET, "ddp": True, "microbatches": 2, **settings})
        plain = net()
        batches = [batch(0, replica) for replica in range(smp.dp_size())]
        expected = plain_gradients(plain, batches, microbatches=2)
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        train_step(model, *batches[smp.dp_rank()])
        optimizer.step()
        after = model.state_dict()
        clip = 1.0
        if settings.get("sharded_data_parallel_degree"):
            norm = torch.stack([g.norm() for g in expected.values()]).norm()
            clip = min(1.0, 1.0 / (float(norm) + 1e-6))
            assert abs(optimizer._global_grad_norm - float(norm)) < 1e-9
        return max(float((before[n] - 0.5 * clip * expected[n] - after[n]).abs().max()) for n in before)

    both = settings.get("shard_optimizer_state") and settings.get("sharded_data_parallel_degree")
    assert max(run_ranks(gradients_and_update, 4 if both else 2, settings)) < 1e-9


class Boxes:
    """An object that cuts itself, under parameter names of its own."""

    def __init__(self, tensor, pieces=()):
        self.tensor = tensor
        self.pieces = pieces

    def smp_slice(self, num_mb, mb, axis):
        return Boxes(torch.chunk(self.tensor, num_mb, axis)[mb], (num_mb, mb, axis))


def containers():
    smp.init({**QUIET, "partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(net())
    seen = []

    @smp.step(non_split_inputs=["weights"], input_split_axes={"across": 1})
    def look(model, x, tree, weights, across, boxes, text, *, options):
        only = next(iter(tree["set"]))
        seen.append(
            [
                tuple(x.shape),
                tuple(tree["list"][0].shape),
                tuple(tree["pair"]["left"].shape),
                tuple(only.shape),
                tuple(weights.shape),
                tuple(across.shape),
                tuple(boxes.tensor.shape),
                boxes.pieces,
                text,
                options.number,
            ]
        )
        return model(x).sum()

    tree = {
        "list": [torch.ones(4, 2), 3],
        "pair": {"left": torch.ones(4, 3), "right": (torch.ones(4),)},
        "set": {torch.ones(4, 5)},
    }
    model.eval()
    with torch.no_grad():
        look(
            model,
            torch.ones(4, FEATURES, dtype=torch.float64),
            tree,
            torch.ones(3),
            torch.ones(3, 4),
            Boxes(torch.ones(4, 2)),
            "text",
            options=SimpleNamespace(number=7),
        )
    return seen


def test_tensors_are_cut_in_all_containers_and_other_things_pass():
    for seen in run_ranks(containers, 2):
        last = seen[-1]
        assert last[:7] == [(2, 6), (2, 2), (2, 3), (2, 5), (3,), (3, 2), (2, 2)]
        assert last[7][0] == 2
        assert last[7][2] == 0
        assert last[8:10] == ["text", 7]


def outputs(settings):
    smp.init({**QUIET, "microbatches": 2, **settings})
    plain = net()
    x, y = batch(0)
    with torch.no_grad():
        whole = plain(x)
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(model, x, y):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        model.backward(loss)
        return {"loss": loss, "nested": [(logits, None)], "number": len(x), "text": "a", "none": None}

    found = train_step(model, x, y)
    logits = found["nested"][0][0]
    assert isinstance(logits, smp.StepOutput)
    assert found["number"] == [4, 4]
    assert found["text"] == ["a", "a"]
    assert found["none"] is None
    assert found["nested"][0][1] is None
    assert torch.allclose(logits.concat(), whole)
    assert torch.allclose(logits.stack(), whole.view(2, 4, 3))
    assert torch.equal(logits.reduce_sum(), logits.outputs[0] + logits.outputs[1])
    assert torch.equal(logits.reduce_mean(), (logits.outputs[0] + logits.outputs[1]) / 2)
    assert isinstance(logits.detach(), smp.StepOutput)
    assert not any(output.requires_grad for output in logits.outputs)
    return sum(found["number"]), found["loss"].reduce_mean().item()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_come_back_as_step_outputs_and_other_things_as_lists(num_ranks):
    found = run_ranks(outputs, num_ranks, {"partitions": num_ranks})
    assert len(set(found)) == 1
    assert found[0][0] == 8


@pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")
def test_a_model_output_of_hugging_face_comes_back_as_one():
    def gpt2():
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

        smp.init({**QUIET, "partitions": 2, "microbatches": 2})
        config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False)
        torch.manual_seed(0)
        with smp.model_creation(tensor_parallelism=True, dtype=torch.get_default_dtype(), fused_softmax=True):
            plain = GPT2LMHeadModel(config)
        model = smp.DistributedModel(plain, trace_device="gpu")
        layers = model.get_module().transformer.seq_layers
        assert [type(layer) for layer in layers] == [smp.nn.DistributedTransformerLayer] * 2
        smp.set_activation_checkpointing(layers[0].attention)
        smp.set_activation_checkpointing(layers[0].output)
        smp.set_activation_checkpointing(layers[1:], strategy="each")

        @smp.step
        def train_step(model, input_ids, attention_mask):
            output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
            model.backward(output["loss"])
            return output

        ids = torch.arange(32).view(4, 8) % 17 if smp.mp_rank() == 0 else torch.zeros(4, 0, dtype=torch.long)
        output = train_step(model, ids, torch.ones_like(ids))
        assert isinstance(output, CausalLMOutputWithCrossAttentions)
        assert output["logits"].concat().shape == (4, 8, 17)
        (translate,) = smp.state.module_manager.translate_functions
        state = model.state_dict()
        assert "transformer.seq_layers.1.attention.query.weight" in state
        torch.manual_seed(0)
        assert set(translate[0](state)) == set(GPT2LMHeadModel(config).state_dict())
        return output["loss"].reduce_mean().item(), output.past_key_values

    first, second = run_ranks(gpt2, 2, env={"TRANSFORMERS_VERBOSITY": "error"}, timeout_s=90)
    assert first == second
    assert first[1] is None
