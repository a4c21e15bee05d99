"""Lightning's strategy: an unedited script, told the strategy's name, trains as in one process."""

import csv

import numpy as np
import pytest
import torch
from scripts_of_others import alone, over_ranks
from torch import nn
from torch.utils.data import DataLoader

import shardwright.torch as sw
from shardwright.testing import run_ranks

lightning = pytest.importorskip("lightning")
SCRIPT = "whole_lightning.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}


def table(folder):
    with (folder / "output/log/version_0/metrics.csv").open() as file:
        return [{name: float(each) for name, each in row.items() if each} for row in csv.DictReader(file)]


def test_two_stages_train_and_evaluate_like_one_process(tmp_path):
    """Hyperparameters, loggers, callbacks, clipping by value, a schedule of steps, test, predict, loading.

    The last batch of an epoch is half of the others.
    """
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
    expected = alone(SCRIPT, cwd=one)
    report = over_ranks(SCRIPT, "--strategy", "shardwright", cwd=two, settings=STAGES)
    assert report["files"] == expected["files"]
    for name in ("tested", "best"):
        assert report[name] == pytest.approx(expected[name], abs=1e-6), name
    for name in ("predicted", "loaded"):
        assert np.allclose(report[name], expected[name], atol=1e-6), name
    ours, theirs = table(two), table(one)
    assert len(ours) == len(theirs) > 20
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-6)
    states = [torch.load(each / "output/last.ckpt", weights_only=True)["state_dict"] for each in (two, one)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)


def _reduced():
    from shardwright.integrations.lightning import ShardwrightStrategy

    sw.init({"run_dir": "off", "data_parallel_degree": 2})
    strategy, number = ShardwrightStrategy(), torch.tensor(1.0 + sw.rank())
    names = ("mean", "sum", "max", "min", torch.distributed.ReduceOp.MAX)
    return [strategy.reduce(number, reduce_op=name).item() for name in names]


def test_numbers_of_all_replicas_that_are_logged():
    """`self.log(..., reduce_fx="max", sync_dist=True)` logged the mean of the maxima."""
    assert run_ranks(_reduced, 2) == [[1.5, 3, 2, 1, 2]] * 2


class Rounded(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean().bfloat16()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_share_of_an_update_that_the_type_of_the_loss_rounds():
    """A third in bfloat16 was taken for a factor of the loop."""
    from shardwright.integrations.lightning import ShardwrightStrategy

    trainer = lightning.Trainer(
        strategy=ShardwrightStrategy({"run_dir": "off"}),
        accelerator="cpu",
        accumulate_grad_batches=3,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Rounded(), DataLoader(torch.ones(12, 3), batch_size=2))
    finally:
        sw.shutdown()
    assert trainer.global_step == 2


class Tags(lightning.LightningModule):
    """Tags positions, of which some do not count; notes what it has logged."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 7, dtype=torch.float64)
        self.logged = []

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = nn.functional.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten(), ignore_index=-1)
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("total", self.layer(batch[0]).square().sum())

    def on_train_batch_end(self, *_):
        self.logged.append(self.trainer.callback_metrics["loss"].item())

    def on_validation_epoch_end(self):
        self.logged.append(self.trainer.callback_metrics["total"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_means_over_labels_that_count_and_sums(accumulate):
    """Microbatches were weighed by their samples, whatever counted in the loss of each."""
    from shardwright.integrations.lightning import ShardwrightStrategy

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (21, 4), generator=generator)
    for number in range(21):
        labels[number, 4 - number % 4 :] = -1
    found = []
    for strategy in (
        "auto",
        ShardwrightStrategy({"run_dir": "off", "microbatches": 3, "plan_one_stage": False}),
    ):
        module = Tags()
        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            accumulate_grad_batches=accumulate,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            loader = DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
            trainer.fit(module, loader, loader)
        finally:
            sw.shutdown()
        found.append((module.logged, module.layer.weight.detach().clone()))
    (plain_logs, plain), (logs, trained) = found
    assert len(plain_logs) == 9  # of three batches and one evaluation in each epoch, and of the sanity check
    assert logs == pytest.approx(plain_logs, abs=1e-7)  # Lightning keeps what is logged in float32
    torch.testing.assert_close(trained, plain, rtol=0, atol=1e-12)
