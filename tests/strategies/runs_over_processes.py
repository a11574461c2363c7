"""Four replicas in any number of processes: `runs_over_processes.py PROCESSES DIRECTORY [NAME]`.

Lightning starts the processes. The first one writes the fingerprints of all runs to
PROCESSES.json in the directory: a SHA-256 of parameters, buffers, states of optimizers, logged
values and predictions.
"""

import hashlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics as tm
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.allreduce import ring_allreduce, sharded_allreduce, tree_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy, processes, reducing

if os.environ.get("GRADIENTS") == "by owner":  # as those of a large model
    reducing.SMALL, processes.LARGE = 0, 64
warnings.simplefilter("ignore")
NUM_REPLICAS = 4


class Keep(Callback):
    """Keeps what is logged, step by step."""

    edits_nothing = True

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.rows.append({k: float(v) for k, v in sorted(trainer.callback_metrics.items())})

    on_train_epoch_end = on_validation_epoch_end = on_train_batch_end


def loader(num_samples: int, shuffle: bool = False) -> DataLoader:
    """Images (N, 1, 8, 8), classes (N,), in batches of 10."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num_samples, 1, 8, 8, generator=generator)
    y = torch.randint(0, 5, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(X, y), 10, shuffle=shuffle)


class Net(LightningModule):
    """A small convolutional network with dropout, and with BatchNorm if asked for."""

    def __init__(self, batchnorm: bool = False, optimizer: str = "SGD", **options: Any) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(4) if batchnorm else nn.Identity()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.3), nn.Linear(144, 5)),
        )
        self.unused = nn.Linear(3, 2)
        self.accuracy = tm.Accuracy("multiclass", num_classes=5)
        self.f1 = tm.F1Score("multiclass", num_classes=5, average="macro")
        self.optimizer, self.options = optimizer, options
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        Z = self.net(X)
        loss = F.cross_entropy(Z, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("count", float(len(y)), reduce_fx="sum")
        self.accuracy(Z, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1(Z, y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        X, y = batch
        Z = self.net(X)
        self.losses.append(F.cross_entropy(Z, y))
        self.accuracy.update(Z, y)
        self.log("val_accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.log("val_losses", torch.stack(self.losses).mean())
        self.log("num_losses", float(len(self.losses)))
        self.losses.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.1, **self.options}
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Weighted(Net):
    """A loss over some of its samples, with how many these are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        losses = F.cross_entropy(self.net(X), y, reduction="none")[y > 1]
        return {"loss": losses.mean(), "weight": len(losses), "Z": losses.detach()}


class Stateful(Net):
    """Assigns attributes in a step: a hidden state, lists, a counter, a buffer."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)
        self.register_buffer("mean", torch.zeros(()))
        self.seen: list[int] = []
        self.all: list[Tensor] = []
        self.h: Any = None
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        Z = self.net(X)
        if self.h is not None and batch_idx < 3:
            Z = Z + 0.1 * self.h[: len(Z)]
        self.h = Z.detach()
        self.num_steps += 1
        self.seen += y.tolist()
        self.all = [*self.all, Z.detach().sum()]
        self.mean = 0.5 * self.mean + 0.5
        self.log("noise", torch.rand(()) + np.random.rand() + random.random())  # noqa: NPY002
        return F.cross_entropy(Z, y)

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(sum(n * i for i, n in enumerate(self.seen))))
        self.log("all", torch.stack(self.all).sum())
        self.log("steps", float(self.num_steps))
        self.h = None


class Sparse(Net):
    """Sparse gradients, a scalar weight, and a shared gradient that autograd gives to two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 144, sparse=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.a, self.b = (nn.Parameter(torch.zeros(5)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        Z = self.net[:4](X) + self.scale * self.embedding(y)
        return F.cross_entropy(self.net[5](Z) + (self.a + self.b), y)


class Manual(Net):
    """Two optimizers and a scheduler by hand."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        X, y = batch
        optimizers: Any = self.optimizers()
        self.kept = [*optimizers, *self.trainer.optimizers, self.lr_schedulers(), self.trainer]
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            Z = self.net(X + float(np.random.rand()))  # noqa: NPY002
            loss = F.cross_entropy(Z, y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)
        self.accuracy(Z, y)
        self.log("accuracy", self.accuracy)
        scheduler: Any = self.lr_schedulers()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.net[0].parameters(), 0.01)
        sgd = torch.optim.SGD(self.net[5].parameters(), 0.1)
        return [adam, sgd], [torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)]


class Recurrent(Net):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        return F.cross_entropy(self.head(self.lstm(X[:, 0])[0][:, -1]), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        Z: Tensor = self.head(self.lstm(batch[0][:, 0])[0][:, -1])
        return Z


class Gathers(Net):
    """Looks at what other replicas have, in a step whose replicas wait for each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        X, y = batch
        Z = self.net(X)
        self.accuracy.update(Z, y)
        self.log("so far", self.accuracy.compute(), on_epoch=False)
        self.log("ranks", float(self.global_rank), reduce_fx="sum")
        everyone: Any = self.all_gather(Z.detach().mean())
        return F.cross_entropy(Z, y) * (1 + everyone.sum() ** 2)


class TopK(ManualAllreduceStrategy):
    """Every replica sends its largest tenth of each gradient, and keeps the rest for later."""

    def setup(self, trainer: Trainer) -> None:
        self.left: dict[str, list[Tensor]] = {}
        super().setup(trainer)

    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        for name, grads in gradients.items():
            sent = []
            for grad, left in zip(grads, self.left.get(name, [torch.zeros_like(g) for g in grads])):
                total = (grad + left).flatten()
                largest = total.abs().topk(max(1, len(total) // 10)).indices
                part = torch.zeros_like(total).index_copy(0, largest, total[largest])
                sent.append(part.view_as(grad))
                grad.copy_((total - part).view_as(grad))
            self.left[name] = [grad.clone() for grad in grads]
            for grad in grads:
                grad.copy_(sum(sent))


class Rounded(ManualAllreduceStrategy):
    """Rounds the sum of each gradient to one of its two neighbours on a grid, at random."""

    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        for grads in gradients.values():
            total = torch.stack([*grads]).sum(0)
            rounded = (total * 1024 + torch.rand_like(total)).floor() / 1024
            for grad in grads:
                grad.copy_(rounded)


CASES: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "sgd": (partial(Net, momentum=0.9), {}),
    "batchnorm, adamw, tree": (
        partial(Net, batchnorm=True, optimizer="AdamW", lr=0.01),
        {"allreduce": tree_allreduce},
    ),
    "batchnorm, ring": (partial(Net, batchnorm=True), {"allreduce": ring_allreduce}),
    "adamw, sharded": (
        partial(Net, optimizer="AdamW", lr=0.01),
        {"allreduce": sharded_allreduce},
    ),
    "accumulation, clipping": (
        partial(Net, batchnorm=True),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "batchnorm, adamw, top-k": (
        partial(Net, batchnorm=True, optimizer="AdamW", lr=0.01),
        {"strategy": TopK},
    ),
    "random rounding": (Net, {"strategy": Rounded}),
    "weights of losses": (Weighted, {"accumulate_grad_batches": 3}),
    "attributes": (Stateful, {}),
    "sparse gradients": (Sparse, {}),
    "lstm": (Recurrent, {}),
    "to be resumed": (partial(Net, optimizer="AdamW", lr=0.02), {"max_epochs": 1}),
    "resumed": (partial(Net, optimizer="AdamW", lr=0.02), {"max_epochs": 3}),
    "manual optimization": (Manual, {"is_whole": True}),
    "lockstep": (Gathers, {"is_whole": True, "lockstep": True}),
}
CASES["sync_batchnorm"] = (
    partial(Net, batchnorm=True, momentum=0.9),
    {"sync_batchnorm": True, "is_whole": True},
)
OPTIONS = ("allreduce", "lockstep")
NOT_OF_TRAINER = (*OPTIONS, "is_whole", "strategy")


class Fails(Net):
    """What goes wrong in process 1, in the second step or in the last."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("mean", None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_second = self.trainer.training and self.trainer.global_step == 1
        if self.fault == "reads another batch once" and self.trainer.global_rank * is_second:
            batch[0][-1] += 1
        return batch

    def on_train_epoch_end(self) -> None:  # after the last validation
        is_last = self.current_epoch == self.trainer.max_epochs - 1
        if self.fault == "edits weights at last" and self.trainer.global_rank * is_last:
            self.net[0].weight.data += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fault == "fills a buffer" and self.mean is None:
            self.mean = batch[0].mean()
        if batch_idx == 1 and self.trainer.global_rank == 1:
            if self.fault == "raises":
                raise LookupError("in sample 7")
            if self.fault == "is killed":
                os.kill(os.getpid(), 9)
        loss = super().training_step(batch, batch_idx)
        if self.fault == "draws in the backward pass":
            loss.register_hook(lambda gradient: gradient + torch.rand(()))
            loss = self.all_gather(loss, sync_grads=True).mean()
        return loss


def in_two_processes(**options: Any) -> ManualAllreduceStrategy:
    """For the conformance suite."""
    return ManualAllreduceStrategy(processes=2, **options)


def run(name: str, num_processes: int, directory: Path) -> str:
    """Train, validate and predict; the fingerprint of everything."""
    make, settings = (
        CASES[name] if name in CASES else (partial(Fails, name), {"lockstep": "draws" in name})
    )
    options = {key: settings[key] for key in OPTIONS if key in settings}
    strategy = settings.get("strategy", ManualAllreduceStrategy)(
        replicas=NUM_REPLICAS,
        processes=num_processes if num_processes > 1 else None,
        seconds=30.0,
        **options,
    )
    is_second = os.environ.get("LOCAL_RANK") == "1"
    seed_everything(4 if name == "has no seed" and is_second else 3, verbose=False)
    keep, module = Keep(), make()
    trainer = Trainer(
        accelerator="cpu",
        devices=max(num_processes, 2),
        strategy=strategy,
        callbacks=[keep],
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **{k: v for k, v in settings.items() if k not in NOT_OF_TRAINER}},
    )
    # batches of 10, and a last one of 3 that leaves one of four processes without samples
    num_samples, num_others = (34, 14) if settings.get("is_whole") else (33, 13)
    num_samples += name == "reads other batches" and is_second
    checkpoint = directory / "after_one_epoch.ckpt"
    trainer.fit(
        module,
        loader(num_samples, shuffle=True),
        loader(num_others),
        ckpt_path=checkpoint if name == "resumed" else None,
        weights_only=False,
    )
    if name == "to be resumed":  # the others read what one process has written
        trainer.save_checkpoint(directory / "own.ckpt" if num_processes > 1 else checkpoint)
    predictions = trainer.predict(module, loader(num_others))
    assert trainer.world_size == 1 and not torch.distributed.is_initialized()
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    everything = [*module.state_dict().items(), states, keep.rows, predictions]
    return fingerprint(everything)


def fingerprint(value: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            add(list(value.items()))
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(value)
    return digest.hexdigest()


def main() -> None:
    num_processes, directory, *names = sys.argv[1:]
    result = {name: run(name, int(num_processes), Path(directory)) for name in names or CASES}
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        Path(directory, f"{num_processes}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
