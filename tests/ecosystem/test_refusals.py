"""What the integrations do not do, they refuse by name, before any rank waits."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright.torch as sw
from shardwright.errors import UsageError


@pytest.fixture(autouse=True)
def ended():
    yield
    sw.shutdown()


@pytest.fixture
def accelerate():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def new_accelerator(**options):
    from shardwright.integrations.accelerate import Accelerator

    return Accelerator(cpu=True, config={"run_dir": "off"}, **options)


def test_a_loss_from_logits_names_the_way_out(accelerate):
    accelerator = new_accelerator(training_outputs=True)
    layer = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(Scored(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    outputs = model(torch.ones(4, 3))
    loss = outputs["logits"].square().mean()
    with pytest.raises(UsageError, match=r"leads back to no parameter.*@sw.step"):
        accelerator.backward(loss)
    with pytest.raises(UsageError, match=r"optimizer.zero_grad\(\) is called.*accelerator.backward"):
        optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"optimizer.step\(\) is called"):
        optimizer.step()
    accelerator.backward(outputs["loss"])
    optimizer.step()


class Scored(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        logits = self.layer(x)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.filterwarnings("ignore")
def test_arguments_of_the_trainer(accelerate, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from shardwright.integrations.transformers import Trainer

    sw.init({"run_dir": "off"})
    model = BertForSequenceClassification(BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=1))
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", auto_find_batch_size=True
    )
    with pytest.raises(UsageError, match=r"auto_find_batch_size=.*a batch size that fits"):
        Trainer(model=model, args=args)


def fit(module):
    lightning = pytest.importorskip("lightning")
    from shardwright.integrations.lightning import ShardwrightStrategy

    trainer = lightning.Trainer(
        strategy=ShardwrightStrategy({"run_dir": "off"}),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2))


def new_module(*, automatic=True, logged=None):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.automatic_optimization = automatic

        def training_step(self, batch):
            loss = self.layer(batch[0]).square().mean()
            if logged is not None:
                self.log("seen", logged)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


@pytest.mark.filterwarnings("ignore")
def test_a_training_step_that_calls_its_optimizers():
    with pytest.raises(UsageError, match="automatic_optimization is False"):
        fit(new_module(automatic=False))


@pytest.mark.filterwarnings("ignore")
def test_a_metric_that_would_see_one_microbatch_after_the_other():
    with pytest.raises(UsageError, match=r'self.log\("seen", ...\) was given a list'):
        fit(new_module(logged=[1.0]))
