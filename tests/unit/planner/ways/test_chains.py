"""The search over models that are chains of layers: convolutional ones, and whatever a factory builds."""

import pytest
from graphs import convolutional_chain

from shardwright.cluster import parse_inventory
from shardwright.errors import InfeasiblePlanError
from shardwright.planner.ways import Task, search
from shardwright.planner.ways.answers import reasons


def task_of(machines="p3.16xlarge*2", *, positions=1, **more):
    return Task(
        model=convolutional_chain(positions=positions),
        machines=parse_inventory(machines),
        **{"batch": 1024, "dtype": "float16", **more},
    )


def test_small_convolutional_nets_train_as_replicas():
    answer = search(task_of())
    assert (answer.best.options.data, answer.best.options.pipeline) == (16, 1)
    assert answer.best.peak_bytes < 16 * 2**30
    assert answer.task.unit == "samples"
    assert any("samples" not in reason for reason in reasons(answer))
    assert all(
        way.options.tensor == way.options.context == way.options.expert == 1 for way in answer.alternatives
    )


def test_what_does_not_fit_is_refused_with_what_would_help():
    pins = {"microbatch": 64, "data": 8, "offload": 0}
    with pytest.raises(InfeasiblePlanError, match="Leave microbatch to the search"):
        search(task_of("p3.16xlarge", positions=100, batch=8 * 64, pins=pins))
    smaller = search(task_of("p3.16xlarge", positions=100, batch=8 * 64, pins={"offload": 0})).best
    assert smaller.options.microbatch < 64


def test_a_traced_transformer_costs_about_what_its_closed_form_says():
    transformers = pytest.importorskip("transformers")
    import torch

    from shardwright.planner.model_chain import chain_of
    from shardwright.torch.units.dry_run import trace_model

    config = transformers.GPT2Config(
        n_embd=1600, n_layer=12, n_head=25, vocab_size=50257, activation_function="gelu"
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(4, 1024, dtype=torch.long)
    graph = trace_model(model, input_ids=ids, labels=ids, num_stages=64, on_accelerators=True)
    chain = chain_of(graph, name="gpt2")
    assert chain.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    from shardwright.catalogue import from_hugging_face

    closed = from_hugging_face(config.to_dict(), name="gpt2")
    machines = parse_inventory("p4d.24xlarge")
    options = {
        "pipeline": 2,
        "data": 4,
        "microbatch": 4,
        "tensor": 1,
        "recompute": 0,
        "sharded": 0,
    }
    way = {"batch": 256, "machines": machines, "pins": {**options, "offload": 0, "schedule": 1}}
    traced = search(Task(model=chain, **way)).best
    formula = search(Task(model=closed, sequence=1024, **way)).best
    # The closed form knows which products are small; the chain knows what crosses units. With the gelu of
    # GPT-2, eight kernels where others have one, the chain takes 1.8 times as long.
    assert traced.step_s == pytest.approx(formula.step_s, rel=0.25)
    assert traced.peak_bytes == pytest.approx(formula.peak_bytes, rel=0.3)
    assert traced.num_bytes["parameters"] == pytest.approx(formula.num_bytes["parameters"], rel=0.2)
