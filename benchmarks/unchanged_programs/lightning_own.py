"""Lightning's fit in bf16-true: a module of one's own, accumulation, validation, a checkpoint, a schedule by steps."""

import argparse
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--precision", default="bf16-true")
args = p.parse_args()


class Tagger(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, args.width)
        layer = nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers)
        self.head = nn.Linear(args.width, 64)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, tags = batch
        return F.cross_entropy(self.head(self.encoder(self.embed(tokens))).flatten(0, 1), tags.flatten())

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        self.log("held", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(3)
data = TensorDataset(torch.randint(20000, (8 * args.batch, args.seq)), torch.randint(64, (8 * args.batch, args.seq)))
with tempfile.TemporaryDirectory() as folder:
    trainer = L.Trainer(
        max_steps=4,
        precision=args.precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],
        val_check_interval=4,
        limit_val_batches=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(Tagger(), DataLoader(data, args.batch, shuffle=True), DataLoader(data, 2 * args.batch))
