"""Times the training steps of a configuration: `python -m lightning_mgpu.benchmark.worker JSON`.

The launcher of a strategy starts further processes by the same command line. The images are random
numbers of Fashion-MNIST's shape: with real ones a step takes as long.
"""

import copy
import json
import os
import pydoc
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_mgpu import models as package_models
from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.data import batch_loader
from lightning_mgpu.devices import gpus, process_devices, synchronize

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
WARM_UP = 3  # steps, in which memory is allocated


@dataclass
class Configuration:
    """One thing to measure.

    Args:
        engine: `loop` (one device) or `book` (several), by hand; `auto`, a Trainer on one device;
            else the name or the path of a strategy.
        replicas: How many share the one device. None: every device has one.
    """

    model: str
    engine: str
    devices: int
    replicas: int | None
    batch_size: int  # global
    num_steps: int  # timed
    processes: int = 1

    @property
    def title(self) -> str:
        names = {"loop": "by hand, one device", "book": "by hand, the book's loop"}
        name = {**names, "auto": "one device"}.get(self.engine, self.engine)
        if self.replicas:
            return f"{name} ({self.replicas} replicas on one device)"
        return name if self.engine in ("loop", "auto") else f"{name} (devices: {self.devices})"


class StepTimer(Callback):
    """Notes when the warm-up and the timed block of steps have ended on the process's devices."""

    def __init__(self, num_steps: int) -> None:
        self.ends = (WARM_UP, WARM_UP + num_steps)
        self.num_done, self.times = 0, list[float]()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.count_step(process_devices(trainer))

    def count_step(self, devices: Iterable[torch.device]) -> None:
        self.num_done += 1
        if self.num_done in self.ends:
            synchronize(devices)
            self.times.append(time.perf_counter())


def make_model(name: str) -> LightningModule:
    """A model of this package by its name, or any LightningModule by its dotted path."""
    found = getattr(package_models, name, None) or pydoc.locate(name)
    if isinstance(found, type) and issubclass(found, LightningModule):
        return found()
    raise ValueError(f"model {name}: take LeNet, ResNet18, or a path, my_package.MyModel")


def make_trainer(configuration: Configuration, *callbacks: Callback) -> Trainer:
    """A Trainer that does nothing besides training."""
    options = {"replicas": configuration.replicas} if configuration.replicas else {}
    return Trainer(
        accelerator=gpus()[0].type if gpus() else "cpu",
        devices=configuration.devices,
        strategy=make_strategy(configuration.engine, **options),
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[*callbacks],
        **dict.fromkeys(OFF, False),  # type: ignore[arg-type]
    )


def make_loader(configuration: Configuration, trainer: Trainer | None = None) -> Any:
    num_samples = (WARM_UP + configuration.num_steps) * configuration.batch_size
    images, labels = torch.rand(num_samples, 1, 28, 28), torch.arange(num_samples) % 10
    dataset, pin = TensorDataset(images, labels), bool(gpus())
    return batch_loader(dataset, configuration.batch_size, trainer, shuffle=True, pin_memory=pin)


def train_by_hand(configuration: Configuration, timer: StepTimer) -> None:
    """The book's loop with torch's SGD. With one device that is a plain PyTorch loop."""
    available = gpus()[: configuration.devices] or [torch.device("cpu")]
    k = configuration.replicas or configuration.devices
    devices = [available[i % len(available)] for i in range(k)]
    model = make_model(configuration.model).train()
    replicas = [copy.deepcopy(model).to(device) for device in devices]
    optimizers = [torch.optim.SGD(replica.parameters(), 0.01) for replica in replicas]
    for X, y in make_loader(configuration):
        losses = []
        for device, replica, *shard in zip(devices, replicas, X.tensor_split(k), y.tensor_split(k)):
            X_shard, y_shard = (part.to(device, non_blocking=True) for part in shard)
            loss = F.cross_entropy(replica(X_shard), y_shard, reduction="sum")
            losses.append(loss / len(y))
        for loss in losses:
            loss.backward()
        for copies in zip(*(replica.parameters() for replica in replicas)):
            textbook_allreduce([parameter.grad for parameter in copies])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        timer.count_step(devices)


def main(configuration: Configuration) -> None:
    seed_everything(0, verbose=False)
    timer = StepTimer(configuration.num_steps)
    if configuration.engine in ("loop", "book"):
        train_by_hand(configuration, timer)
    else:
        trainer = make_trainer(configuration, timer)
        trainer.fit(make_model(configuration.model), make_loader(configuration, trainer))
    if os.environ.get("LOCAL_RANK", "0") == "0":  # Lightning's launcher sets it
        start, end = timer.times
        print(json.dumps({"seconds": (end - start) / configuration.num_steps}), flush=True)
    os._exit(0)  # gloo's threads may end a finished process with SIGABRT (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(Configuration(**json.loads(sys.argv[1])))
