"""Runs the Python of README and docs, each block beside what its text takes for granted.

A block has a row in a table here with what it needs (names before it, ranks, smaller numbers), or with the
reason why it does not run. A block without a row runs alone, on one rank.
"""

import ast
import math
from typing import Any, NamedTuple

import pytest

from pages import blocks, execute
from shardwright.config import Config
from shardwright.testing import run_ranks

SETTINGS = '{"run_dir": "off", "profile": "estimated", "microbatches": 2}'

NAMES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import shardwright.torch as sw

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

torch.manual_seed(0)
model, loss_function, epochs = Net(), nn.CrossEntropyLoss(), 1
dataset = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
"""

WRAPPED = f"""{NAMES}
sw.init()
model = sw.DistributedModel(model)
optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
sampler = sw.distributed_sampler(dataset)
loader = DataLoader(dataset, 16, sampler=sampler)
x, y = next(iter(loader))

@sw.step
def train_step(model, x, y):
    loss = loss_function(model(x), y)
    model.backward(loss)
    return loss

@sw.step
def evaluate(model, x, y=None):
    return model(x) if y is None else (model(x).argmax(1) == y).float().mean()
"""

LANGUAGE = f"""{NAMES}
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM
from transformers import GPT2Config, GPTJConfig, GPTJForCausalLM
sizes = dict(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
config = GPT2Config(**sizes)
x = y = torch.arange(32).reshape(4, 8)
batches = [(x, y)] * 2
model = AutoModelForCausalLM.from_config(config)
"""

TEACHER = """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(), Net()

    def forward(self, x):
        return self.student(x)

net = model = Pair()
"""

GROUP = f"""{NAMES}
import shardwright.torch
output, gradients = torch.empty(2048), torch.randn(4096)
"""


class Runs(NamedTuple):
    """What a block needs: code before and after it, ranks, and other numbers than for a reader."""

    before: str
    after: str = ""
    ranks: int = 2
    instead: tuple[tuple[str, str], ...] = ()


_SPREADS = "train_step(model, x, y)"  # ranks get their parts in the first step

ROWS: dict[str, Runs | str] = {
    "README.md-0 diff": Runs(f"{LANGUAGE}\nfrom torch.optim import AdamW"),
    "coming_from.md-0 diff": Runs(f"{NAMES}\nloader, local_rank = DataLoader(dataset, 8), 0"),
    "coming_from.md-1 diff": Runs(NAMES, instead=(('_degree": 8', '_degree": 2'),)),
    "index.md-0": Runs(LANGUAGE, _SPREADS),
    "attention.md-0": Runs(
        f"{LANGUAGE}\nsw.init()\nconfig = BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, "
        "num_attention_heads=2, intermediate_size=8)"
    ),
    "checkpoints.md-0": Runs(
        WRAPPED,
        "assert step == 6",
        instead=(
            ("10_000)", "6)"),
            ("< 10_000", "< 6"),
            ("dataset, 64", "dataset, 16"),
            ("model = sw.DistributedModel(model)", ""),
            ("sw.Checkpoints(", 'sw.Checkpoints("saved", '),
        ),
    ),
    "checkpoints.md-1": "streams a data set of Hugging Face: tests/ranks/checkpoints/test_streams_resumed.py",
    "checkpoints.md-2": "calls of FSDP2 alone: tests/ranks/checkpoints/test_dcp_folders.py",
    "collectives.md-0": Runs(NAMES, "dist.all_reduce(torch.ones(2))"),
    "collectives.md-1": Runs(GROUP),
    "collectives.md-2": "the choices for GPUs: tests/one_gpu.py",
    "commands.md-0": Runs("import torch\ndef GPT(layers): return layers", "assert build()[0] == 48", ranks=1),
    "context_parallelism.md-2": "a part of a forward",
    "ecosystem.md-0": Runs(
        "import warnings\nwarnings.simplefilter('ignore', FutureWarning)  # of PEFT to transformers",
        "from pathlib import Path\nassert list(Path('merged').glob('*.safetensors'))",
    ),
    "estimator.md-0": "starts a job of two hosts: tests/unit/launch/test_estimator.py",
    "estimator.md-1": "names Slurm, Kubernetes and Ray: tests/e2e",
    "launch.md-0": "starts ranks from a notebook: tests/ecosystem/test_notebook.py runs quickstart.ipynb",
    "script.md-0": Runs(f"{WRAPPED}\nsamples_seen = 0", f"{_SPREADS}; assert samples_seen == 16"),
    "script.md-1": Runs(
        WRAPPED,
        "assert abs(train_loss.reduce_mean() - loss.reduce_mean()) < 1e-6\n"
        "assert all(p.grad is not None for p in model.local_parameters())\n"
        "assert logits.concat().shape == (16, 3)",
    ),
    "script.md-2": Runs(WRAPPED),
    "script.md-3": Runs(f"{WRAPPED}\n{_SPREADS}; model.eval()"),
    "script.md-4": Runs(
        f"{WRAPPED}\n{_SPREADS}; model.eval(); data = dataset", "assert outputs.shape == (32, 3)"
    ),
    "script.md-5": Runs(f"{WRAPPED}\n{_SPREADS}; optimizer.step()", "average(); exchange(); exchange()"),
    "script.md-6": Runs(WRAPPED.replace("sw.init()", f"{TEACHER}\nsw.init()"), f"{_SPREADS}; follow()"),
    "script.md-7": Runs(f"{WRAPPED}\n{_SPREADS}"),
    "script.md-8": Runs(f"{WRAPPED}\n{_SPREADS}"),
    "script.md-9": Runs(
        f"{LANGUAGE}\nsw.init()\nconfig = GPTJConfig(**sizes, rotary_dim=4)",
        "assert model.module.config is config",
    ),
    "script.md-10": Runs(
        f"{NAMES}\nimport torch.nn.functional as F\nvocabulary = 2048\n"
        'sw.init({"loss_chunks": 4, "profile": "estimated"})\n'
        "layers = nn.Embedding(2048, 8), nn.LayerNorm(8), nn.Linear(8, 2048)\n"
        "model = sw.DistributedModel(nn.Sequential(*layers))",
        "assert train_step(model, torch.arange(64).reshape(4, 16)).reduce_mean() > 0",
    ),
    "sharding.md-1": "names options with ... in the place of values",
    "sharding.md-2": Runs(NAMES),
    "slow_run.md-0": Runs(f"{WRAPPED}\n{_SPREADS}"),
    "testing.md-1": "needs network namespaces: tests/cluster",
    "trackers.md-0": Runs(f"{NAMES}", ranks=1),
}
"""What blocks need, by page, number and language."""


def _code() -> dict[str, str]:
    """Python, and what a diff makes of a script."""
    found = {str(block): block.text for block in blocks("python") if block.page != "tensorflow.md"}
    for block in blocks("diff"):
        lines = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
        found[f"{block} diff"] = "\n".join(lines)
    return found


def _settings(text: str) -> list[dict[str, Any]]:
    """The settings of a block that has ``sw.init({...})`` alone."""
    found: list[dict[str, Any]] = []
    for statement in ast.parse(text).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "sw.init":
            return []
        value = ast.literal_eval(call.args[0])
        found += [value] if isinstance(value, dict) else []
    return found


CODE = _code()
SETTINGS_ALONE = [name for name, text in CODE.items() if _settings(text)]
RUN = [name for name in CODE if name not in SETTINGS_ALONE and not isinstance(ROWS.get(name), str)]


def test_rows_are_of_blocks_that_are_there():
    assert set(ROWS) <= set(CODE) - set(SETTINGS_ALONE)


@pytest.mark.parametrize("name", RUN)
def test_a_block_runs(name, tmp_path):
    row, text = ROWS.get(name, Runs("", ranks=1)), CODE[name]
    for words, others in row.instead:
        assert words in text
        text = text.replace(words, others)
    source = "\n".join([row.before, text, row.after])

    makes_group = "init_process_group" in text
    run_ranks(
        execute,
        row.ranks,
        source,
        tmp_path,
        env={"SHARDWRIGHT_SET": SETTINGS},
        init_process_group=not makes_group,
    )


@pytest.mark.parametrize("name", SETTINGS_ALONE)
def test_settings_are_taken(name):
    for settings in _settings(CODE[name]):
        degrees = [value for setting, value in settings.items() if setting.endswith("_degree")]
        Config.merge(settings).resolve_world(math.prod(degrees))
