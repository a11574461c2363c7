"""The module, the data and the callbacks that cases are made of: small, in float64, and the same on every device."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, SumMetric

from lightning_mgpu.data import batch_loader


class Data(LightningDataModule):
    """Global batches of X (B, 6), y (B, 3), a smooth function of X, and the samples' indices (B,)."""

    def __init__(self, num_samples: int = 48, batch_size: int = 12, num_test: int = 0) -> None:
        super().__init__()
        self.num_samples, self.batch_size, self.num_test = num_samples, batch_size, num_test

    def train_dataloader(self) -> DataLoader:
        return batch_loader(samples(self.num_samples), self.batch_size, self.trainer, shuffle=True, seed=0)

    def test_dataloader(self) -> DataLoader:
        return batch_loader(samples(self.num_test), self.batch_size, self.trainer)

    predict_dataloader = test_dataloader


def samples(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    X = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(X, torch.stack([X.sum(1).sin(), X[:, 0], X[:, 1] ** 2], 1), torch.arange(num_samples))


def mlp(*norm: nn.Module, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def adamw_one_cycle(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Probe(LightningModule):
    """An MLP, or the net given, fitted to `samples`; `configure` is what `configure_optimizers` does."""

    def __init__(self, net: nn.Module | None = None, configure: Callable[[nn.Module], Any] = sgd) -> None:
        super().__init__()
        self.net = net or mlp()
        self.configure = configure
        self.double()

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        X, y, _ = batch
        return F.mse_loss(self.net(X), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Logs(Probe):
    """Logs a value and a torchmetrics object in every step; several processes need `sync_dist`, as in any project."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()
        self.num_samples, self.sum_of_indices = (SumMetric().set_dtype(torch.float64) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, _ = batch
        prediction = self.net(X)
        loss = F.mse_loss(prediction, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(X))
        self.error(prediction, y)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, index = batch
        prediction = self.net(X)
        self.error(prediction, y)
        self.num_samples(torch.ones_like(index))
        self.sum_of_indices(index)
        self.log_dict({"error": self.error, "samples": self.num_samples, "indices": self.sum_of_indices})


class TwoOptimizers(Probe):
    """Manual optimization: two networks, one trained to undo what the other does, each by its own optimizer."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.there, self.back = nn.Linear(6, 4).double(), nn.Linear(4, 6).double()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        X, y, _ = batch
        optimizers: Any = self.optimizers()
        losses = (lambda: F.mse_loss(self.there(X)[:, :3], y), lambda: F.mse_loss(self.back(self.there(X)), X))
        for optimizer, loss in zip(optimizers, losses):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return sgd(self.there), torch.optim.Adam(self.back.parameters(), 0.01)


class SeesDtype(Probe):
    """Float32, and logs whether its layers compute in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y, _ = batch
        prediction = self.net(X.float())
        self.log("in bf16", float(prediction.dtype == torch.bfloat16), sync_dist=True)
        return F.mse_loss(prediction.float(), y.float())


class Fails(Probe):
    """Cannot take the last sample of the dataset, whoever gets it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch[2] == 47).any():
            raise ValueError("sample 47 cannot be used")
        return self.loss(batch)


class Written(DummyLogger):
    """Keeps what is logged: (step, {name: value})."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items() if name != "epoch"}))


class SeesGradients(Callback):
    """Keeps the gradients that callbacks see, after the backward pass and before the update."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen += [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)


class SeesReplicas(Callback):
    """After every step compares the replicas, bit by bit: those of all processes, or of a strategy."""

    __module__ = "lightning_mgpu.testing"  # looks only

    def __init__(self) -> None:
        self.are_equal: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        replicas: list[Any] = replicas_of(trainer.strategy, pl_module)
        if torch.distributed.is_initialized():
            [own] = replicas
            torch.distributed.all_gather_object(replicas := [None] * torch.distributed.get_world_size(), own)
        self.are_equal.append(all(torch.equal(a, b) for other in replicas for a, b in zip(replicas[0], other)))


def replicas_of(strategy: Any, module: nn.Module) -> list[list[Tensor]]:
    """The parameters of every replica. A strategy that is no strategy of ours is taken to have one."""
    replicas: Any = getattr(strategy, "replicas", None)
    all_parameters = [module.parameters()] if replicas is None else zip(*replicas.parameters)
    return [[parameter.detach().cpu() for parameter in parameters] for parameters in all_parameters]
