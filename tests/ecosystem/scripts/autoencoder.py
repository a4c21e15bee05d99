"""Trains an autoencoder with Lightning, as in its introduction; the strategy is an argument."""

import argparse
import json
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(28, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 28)
        )
        self.losses = []

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z = self(x)
        loss = nn.functional.mse_loss(self.decoder(z), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self(x)), x)
        self.log_dict({"val_loss": loss, "val_codes": self(x).abs().mean()})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(self.trainer.callback_metrics["train_loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--ckpt_path")
    args = parser.parse_args()

    L.seed_everything(5)
    train_loader = DataLoader(TensorDataset(torch.rand(76, 28)), batch_size=8, shuffle=True)
    val_loader = DataLoader(TensorDataset(torch.rand(20, 28)), batch_size=8)
    model = LitAutoEncoder()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=args.max_epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=0.5,
        default_root_dir=args.output_dir,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader, val_loader, ckpt_path=args.ckpt_path)
    [evaluation] = trainer.validate(model, val_loader, verbose=False)
    trainer.save_checkpoint(Path(args.output_dir, "last.ckpt"))
    if trainer.is_global_zero:
        report = {"losses": model.losses, "evaluation": evaluation}
        Path(args.output_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
