"""Uses what Lightning's examples use: hyperparameters, loggers, early stop, test, predict, a checkpoint."""

import argparse
import json
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        x = torch.rand(96, 1, 6, 6, generator=generator)
        data = TensorDataset(x, (x[:, 0, 0, 0] * 4).long())
        self.train, self.val, self.test = random_split(data, [60, 20, 16], generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=8)

    predict_dataloader = test_dataloader


class Classifier(L.LightningModule):
    def __init__(self, hidden=32, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 1, 6, 6)
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, x):
        return self.head(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", nn.functional.cross_entropy(logits, y))
        self.log(f"{stage}_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()

    L.seed_everything(5, workers=True)
    data, model = Digits(), Classifier()
    best = ModelCheckpoint(monitor="val_loss", filename="best")
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        gradient_clip_algorithm="value",
        log_every_n_steps=1,
        default_root_dir=args.output_dir,
        logger=CSVLogger(args.output_dir, name="log"),
        callbacks=[best, EarlyStopping("val_loss", patience=2), LearningRateMonitor()],
    )
    trainer.fit(model, datamodule=data)
    [tested] = trainer.test(model, datamodule=data, ckpt_path="best")
    predicted = torch.cat(trainer.predict(model, datamodule=data))
    trainer.save_checkpoint(Path(args.output_dir, "last.ckpt"))
    trainer.strategy.barrier()
    loaded = Classifier.load_from_checkpoint(best.best_model_path).eval()
    again = torch.cat([loaded(x).softmax(1) for x, _ in data.test_dataloader()])
    if trainer.is_global_zero:
        report = {
            "tested": tested,
            "predicted": predicted.tolist(),
            "loaded": again.tolist(),
            "best": float(best.best_model_score),
            "files": sorted(path.name for path in Path(args.output_dir, "log/version_0").iterdir()),
        }
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
