"""Small modules and data in float64 for the cases, the same on all devices, and their Trainer."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, SumMetric

from lightning_mgpu.data import batch_loader
from lightning_mgpu.protocols import strategy_facts
from lightning_mgpu.cli.strategy_names import make_strategy

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


@dataclass(frozen=True)
class StrategySpec:
    """A strategy, by Lightning's name or a dotted path, and the devices that it gets."""

    strategy: str = "auto"
    devices: int = 1
    accelerator: str = "cpu"

    def trainer(self, **kwargs: Any) -> Trainer:
        """A quiet Trainer of two epochs with a new strategy; `kwargs` replace these settings."""
        settings: dict[str, Any] = dict.fromkeys(OFF, False)
        settings |= {"max_epochs": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
        settings |= {"devices": self.devices, "accelerator": self.accelerator}
        settings["strategy"] = make_strategy(self.strategy)
        return Trainer(**{**settings, **kwargs})


class Data(LightningDataModule):
    """Global batches of X (B, 6), y (B, 3), a smooth function of X, and samples' indices (B,)."""

    def __init__(self, num_samples: int = 48, batch_size: int = 12) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(7)
        X = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
        y = torch.stack([X.sum(1).sin(), X[:, 0], X[:, 1] ** 2], 1)
        self.samples = TensorDataset(X, y, torch.arange(num_samples))

    def train_dataloader(self) -> DataLoader:
        return batch_loader(self.samples, self.batch_size, self.trainer, shuffle=True, seed=0)

    def test_dataloader(self) -> DataLoader:
        return batch_loader(self.samples, self.batch_size, self.trainer)

    predict_dataloader = test_dataloader


class Probe(LightningModule):
    """An MLP for `Data`, by SGD with momentum, or by AdamW with a scheduler stepped every batch."""

    def __init__(self, batchnorm: bool = False, dropout: float = 0.0, adamw: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
        )
        self.adamw = adamw
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, _ = batch
        return F.mse_loss(self.net(X), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        if not self.adamw:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Logs(Probe):
    """Logs values and torchmetrics objects in every step; several processes need `sync_dist`."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError().set_dtype(torch.float64)
        self.num_samples = SumMetric().set_dtype(torch.float64)
        self.sum_of_indices = SumMetric().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, _ = batch
        prediction = self.net(X.to(self.dtype))
        loss = F.mse_loss(prediction.to(y.dtype), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(X))
        self.log("in_bf16", float(prediction.dtype == torch.bfloat16), sync_dist=True)
        self.error(prediction, y)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, index = batch
        self.error(self.net(X), y)
        self.num_samples(torch.ones_like(index))
        self.sum_of_indices(index)
        metrics = {"samples": self.num_samples, "indices": self.sum_of_indices}
        self.log_dict({"error": self.error, **metrics})


class Masked(Probe):
    """A loss over the rows whose target is positive, and how many these are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, _ = batch
        is_counted = y[:, 0] > 0
        losses = (self.net(X) - y)[is_counted].square().sum(1)
        return {"loss": losses.mean(), "weight": len(losses)}


class TwoOptimizers(Probe):
    """Manual optimization of two networks, an optimizer for each; the second inverts the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()
        self.there, self.back = nn.Linear(6, 4).double(), nn.Linear(4, 6).double()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        X, y, _ = batch
        optimizers: Any = self.optimizers()
        losses = (
            lambda: F.mse_loss(self.there(X)[:, :3], y),
            lambda: F.mse_loss(self.back(self.there(X)), X),
        )
        for optimizer, loss in zip(optimizers, losses):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.there.parameters(), 0.1, momentum=0.9)
        return sgd, torch.optim.Adam(self.back.parameters(), 0.01)


class Fails(Probe):
    """Raises an error for the last sample of the dataset, on any device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch[2] == 47).any():
            raise ValueError("sample 47 cannot be used")
        return super().training_step(batch, batch_idx)


class RunObserver(Callback):
    """Keeps gradients and logged values; counts the steps after which replicas differ."""

    edits_nothing = True  # else our strategies would copy weights instead of updating every replica

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.logged: list[dict[str, float]] = []
        self.num_different = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.gradients += [gradient.cpu().clone() for gradient in gradients]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.on_train_epoch_end(trainer, pl_module)
        replicas = replica_parameters(trainer.strategy, pl_module)
        if torch.distributed.is_initialized():
            gathered: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, replicas[0])  # a process has one
            replicas = gathered
        self.num_different += not all(
            torch.equal(a, b) for replica in replicas for a, b in zip(replicas[0], replica)
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def replica_parameters(strategy: Any, module: nn.Module) -> list[list[Tensor]]:
    """The parameters of every replica, on the CPU. A strategy without `replicas` has one."""
    replicas, one = strategy_facts(strategy).replicas, [module.parameters()]
    sets = one if replicas is None else zip(*replicas.parameter_sets.values())
    return [[parameter.detach().cpu() for parameter in parameters] for parameters in sets]
