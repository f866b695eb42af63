"""Lightning with manual optimization: accumulation, clipping, two optimizers and averaged weights."""

import argparse
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=192)
p.add_argument("--batch", type=int, default=48)
p.add_argument("--size", type=int, default=128)
args = p.parse_args()


class Autoencoder(L.LightningModule):
    """A convolutional VAE whose encoder and decoder have an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        down: list[nn.Module] = [nn.Conv2d(3, args.width, 3, 2, 1)]
        up: list[nn.Module] = []
        for _ in range(3):
            down += [nn.GroupNorm(8, args.width), nn.SiLU(), nn.Conv2d(args.width, args.width, 3, 2, 1)]
            up += [nn.Upsample(scale_factor=2), nn.Conv2d(args.width, args.width, 3, 1, 1), nn.Mish()]
        self.encoder = nn.Sequential(*down, nn.Conv2d(args.width, 32, 1))
        last = nn.Conv2d(args.width, 3, 3, 1, 1)
        self.decoder = nn.Sequential(nn.Conv2d(16, args.width, 1), *up, nn.Upsample(scale_factor=2), last)

    def training_step(self, batch: list[torch.Tensor], number: int) -> None:
        (images,) = batch
        mean, spread = self.encoder(images).chunk(2, 1)
        made = self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp())
        divergence = 0.5 * (mean**2 + spread.exp() - spread - 1).mean()
        loss = F.l1_loss(made, images) + 0.01 * divergence
        self.manual_backward(loss / 3)
        if number % 3 == 2:
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.encoder, self.decoder)]


class Average(Callback):
    def on_train_start(self, _trainer: L.Trainer, module: L.LightningModule) -> None:
        self.average = AveragedModel(module, avg_fn=get_ema_avg_fn(0.99))

    def on_train_batch_end(self, _trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        self.average.update_parameters(module)


L.seed_everything(1)
images = TensorDataset(torch.rand(9 * args.batch, 3, args.size, args.size))
with tempfile.TemporaryDirectory() as folder:
    trainer = L.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=[Average()],
    )
    trainer.fit(Autoencoder(), DataLoader(images, args.batch, pin_memory=True))
    print(trainer.callback_metrics)
