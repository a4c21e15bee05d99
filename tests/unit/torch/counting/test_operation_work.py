"""What operations compute and move, as a trace counts it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.model_graph import Work
from shardwright.torch.units.dry_run import trace_model

SAMPLES, WIDTH = 4, 8


def work_of(module, *inputs, on_accelerators=False):
    """Of the first unit of a model that has it beside another one."""
    model = nn.Sequential(module, nn.Linear(WIDTH, WIDTH))
    graph = trace_model(model, *inputs, on_accelerators=on_accelerators)
    return next(graph.nodes[call].work for call in graph.calls if graph.nodes[call].name.startswith("0"))


def test_an_embedding_reads_the_rows_that_it_writes():
    work = work_of(nn.Embedding(1000, WIDTH), torch.zeros(SAMPLES, dtype=torch.long))
    assert work == Work(kernels=1, moved_bytes=2 * 4 * SAMPLES * WIDTH)


class Attention(nn.Module):
    def __init__(self, causal, dropout=0.0):
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = (x * self.scale).view(1, 1, SAMPLES, WIDTH)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout, is_causal=self.causal)


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_fused_attention_skips_what_a_causal_mask_hides(causal, share):
    work = work_of(Attention(causal), torch.ones(SAMPLES, WIDTH))
    assert work.attention_flops == 4 * SAMPLES**2 * WIDTH * share
    assert work.products == 0


def test_dropout_does_not_unfuse_attention_on_accelerators():
    on_cpus = work_of(Attention(True, dropout=0.1), torch.ones(SAMPLES, WIDTH))
    there = work_of(Attention(True, dropout=0.1), torch.ones(SAMPLES, WIDTH), on_accelerators=True)
    assert on_cpus.products == 2
    assert (there.products, there.attention_flops) == (0, 2 * SAMPLES**2 * WIDTH)


def test_dropout_is_one_kernel_on_accelerators():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
    there = work_of(module, torch.ones(SAMPLES, WIDTH), on_accelerators=True)
    assert there.kernels <= work_of(module, torch.ones(SAMPLES, WIDTH)).kernels
