"""Small modules in float64, with their data: batches of X (B, 6)."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_mgpu.data import batch_loader


class Probe(LightningModule):
    """An MLP, always with the same first weights; `data` is (samples, global batch size)."""

    def __init__(
        self, data: tuple[int, int], norm: bool = False, dropout: float = 0.0, adamw: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = (nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout))
        self.net = nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 6)).double()
        self.error = MeanAbsoluteError().set_dtype(torch.float64)
        self.adamw = adamw
        num_samples, self.batch_size = data
        self.samples = TensorDataset(torch.randn(num_samples, 6).double())

    def train_dataloader(self) -> DataLoader:
        return batch_loader(self.samples, self.batch_size, self.trainer, shuffle=True, seed=0)

    def val_dataloader(self) -> DataLoader:
        return batch_loader(self.samples, self.batch_size, self.trainer)

    def loss(self, X: Tensor) -> Tensor:
        return F.mse_loss(self.net(X), X.flip(1).sin())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self.net(batch[0]), batch[0])
        self.log_dict({"loss": self.loss(batch[0]), "torchmetrics": self.error})
        self.log("loss with sync_dist", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if not self.adamw:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Masked(Probe):
    """A loss over some of the samples, weighted by how many these are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X = batch[0][batch[0][:, 0] > 0]
        return {"loss": self.loss(X), "weight": len(X)}


class Manual(Probe):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        optimizer.step()
