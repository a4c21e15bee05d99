"""Shared parameters and their gradients, between hosts in 8 bits."""

import json

import pytest
import torch
from sharded import plain_training, sharded_training

from choices import in_sweep
from shardwright.errors import ConfigError
from shardwright.testing import run_ranks

EVERY = {"sdp_reduce_every_microbatch": True, "microbatches": 2}
GRADIENTS, PARAMETERS = "sdp_quantized_gradients", "sdp_quantized_parameters"


def errors_of(folder):
    texts = [path.read_text() for path in folder.rglob("metrics.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    names = ("communication/gradient_error(share)", "communication/parameter_error(share)")
    return [[line.get(name) for name in names] for line in lines]


@pytest.mark.parametrize(
    ("degree", "ranks_per_host", "kinds", "more"),
    [
        in_sweep(4, 2, {GRADIENTS}, {}),
        in_sweep(4, 2, {GRADIENTS}, EVERY),
        in_sweep(4, 2, {PARAMETERS}, {}),
        in_sweep(4, 1, {GRADIENTS, PARAMETERS}, {}),
        (4, 3, {GRADIENTS, PARAMETERS}, EVERY),
        in_sweep(2, 1, {GRADIENTS, PARAMETERS}, {}),
        (2, 2, {GRADIENTS}, EVERY),  # the second hop goes between hosts
    ],
)
def test_training_in_8_bits_is_nearly_the_same(degree, ranks_per_host, kinds, more, tmp_path):
    settings = {
        "sharded_data_parallel_degree": degree,
        **dict.fromkeys(kinds, True),
        **more,
        "run_dir": str(tmp_path),
        "sdp_max_live_parameters": 1200 if degree == 4 else 10**9,
    }
    expected, _, state = plain_training("SGD")
    found = run_ranks(sharded_training, 4, settings, "SGD", ranks_per_host=ranks_per_host)
    for losses, _, own_state, _ in found:
        assert losses == pytest.approx(expected, rel=0.02)
        assert losses != pytest.approx(expected, rel=1e-9)
        for name, value in own_state.items():
            # All ranks have the same, and what nobody uses stays as it is.
            assert torch.equal(value, found[0][2][name])
            assert (value - state[name]).norm() < 0.05 * state[name].norm() + 1e-3
        assert torch.equal(own_state["unused.weight"], state["unused.weight"])
    for errors in errors_of(tmp_path):
        for error, kind in zip(errors, (GRADIENTS, PARAMETERS), strict=True):
            assert (error is not None) == (kind in kinds)
            assert error is None or 1e-4 < error < 0.02


def test_nothing_is_rounded_on_one_host(tmp_path):
    settings = {
        "sharded_data_parallel_degree": 2,
        GRADIENTS: True,
        PARAMETERS: True,
        "run_dir": str(tmp_path),
    }
    expected, _, _ = plain_training()
    for losses, *_ in run_ranks(sharded_training, 4, settings):
        assert losses == pytest.approx(expected, rel=1e-12)
    assert errors_of(tmp_path) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("settings", [{"ddp_dist_backend": "gloo"}, {"shared_memory": False}])
@pytest.mark.parametrize("key", [GRADIENTS, PARAMETERS])
def test_a_transport_that_cannot(settings, key):
    def run(settings):
        import shardwright.torch as sw

        with pytest.raises(ConfigError) as caught:
            sw.init({"run_dir": "off", "sharded_data_parallel_degree": 2, **settings})
        return str(caught.value)

    for message in run_ranks(run, 2, {**settings, key: True}):
        assert message.startswith(f"{key} needs Shardwright's own collectives, but replicas use gloo here")
        assert "set ddp_dist_backend auto and shared_memory true" in message
