"""Measures a configuration in its own process: `python -m lightning_mgpu.benchmark.steps JSON`.

After a warm-up, one stretch of steps is timed as it is, and another one with a clock at every part
of a step. The images are synthetic; with real ones a step takes as long.
"""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.benchmark.parts import Parts, finished_clock
from lightning_mgpu.benchmark.plan import BY_HAND, Configuration, make_model
from lightning_mgpu.benchmark.processes import num_cores, print_result
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.data.batches import copies_faster_from_pinned
from lightning_mgpu.devices import gpus, process_devices
from lightning_mgpu.processes import leave_group
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: Any = {"limit_val_batches": 0, **dict.fromkeys(OFF, False)}
"""Options of a Trainer that does nothing besides training."""
WARM_UP = 3  # steps; the first one allocates and compiles
STRATEGY_METHODS = [
    *(("replicas", "find"), ("replicas", "begin"), ("replicas", "enter"), ("edits", "combine")),
    *(("recorder", "recording"), ("recorder", "combine_calls"), ("gradients", "push")),
    *(("updates", "begin"), ("updates", "use_state_of")),
]
"""What our strategies do beside a step's parts: attributes of the strategy, and their methods."""


class StepTimer(Callback):
    """Times two stretches of `num_steps` after a warm-up, the second with a clock at each part."""

    # As a script this file is `__main__`: strategies would take its hooks for a user's, which may
    # edit weights.
    edits_nothing = True

    def __init__(self, parts: Parts, num_steps: int) -> None:
        self.parts, self.num_steps = parts, num_steps
        self.count, self.start, self.seconds = -WARM_UP, 0.0, list[float]()

    def count_step(self) -> bool:
        """Count a step; returns whether it was the last one."""
        self.count += 1
        if self.count < 0 or self.count % self.num_steps:
            return False
        if self.count > 0:
            self.seconds.append(self.parts.clock() - self.start)
        self.parts.is_on = self.count == self.num_steps
        self.start = self.parts.clock()
        return len(self.seconds) == 2

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parts.clock = finished_clock(process_devices(trainer))
        if not isinstance(trainer.strategy, TrainBatchStrategy):
            return
        for attribute, method in STRATEGY_METHODS:
            owner = getattr(trainer.strategy, attribute)
            setattr(owner, method, timed(getattr(owner, method), self.parts, "strategy"))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        trainer.should_stop = self.count_step()

    def result(self) -> dict[str, Any]:
        """Seconds of a step, and of its parts."""
        plain, with_parts = self.seconds
        parts = self.parts.of_step(with_parts, self.num_steps)
        return {"step": plain / self.num_steps, "parts": parts}


def measure_strategy(configuration: Configuration, data: FashionMNIST) -> dict[str, Any] | None:
    """Measure a strategy in the Trainer; None in processes other than the first."""
    timer = StepTimer(Parts(), configuration.num_steps)
    options = {"replicas": configuration.replicas, "processes": configuration.processes}
    options = {name: number for name, number in options.items() if number}
    strategy = make_strategy(configuration.engine, **options)
    if isinstance(strategy, TrainBatchStrategy):
        reduce_gradients = timed(strategy.reduce_gradients, timer.parts, "allreduce")
        strategy.reduce_gradients = reduce_gradients  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator=gpus()[0].type if gpus() else "cpu",
        devices=configuration.devices,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[timer],
        profiler=timer.parts,
        **QUIET,
    )
    trainer.fit(make_model(configuration.model), data)
    return timer.result() if trainer.is_global_zero else None


def timed(function: Callable[..., Any], parts: Parts, part: str) -> Callable[..., Any]:
    """The function, timed as this part. If it returns a context, entering and leaving count too."""

    @contextmanager
    def block(context: AbstractContextManager) -> Iterator[None]:
        with ExitStack() as stack:
            with parts.profile(part):
                stack.enter_context(context)
            yield
            with parts.profile(part):
                stack.close()

    def call(*args: Any, **kwargs: Any) -> Any:
        with parts.profile(part):
            result = function(*args, **kwargs)
        return block(result) if isinstance(result, AbstractContextManager) else result

    return call


def make_train_batch(
    replicas: Sequence[nn.Module], parts: Parts
) -> Callable[[tuple[Tensor, Tensor]], None]:
    """The book's `train_batch` with torch's SGD, for copies of a model, each on its device.

    With one copy that is a plain PyTorch loop.
    """
    devices = [next(replica.parameters()).device for replica in replicas]
    optimizers = [torch.optim.SGD(replica.parameters(), 0.01) for replica in replicas]
    parameters = list(zip(*(replica.parameters() for replica in replicas)))

    def split(batch: Tensor) -> list[Tensor]:
        shards = batch.tensor_split(len(devices))
        return [shard.to(device, non_blocking=True) for shard, device in zip(shards, devices)]

    def train_batch(batch: tuple[Tensor, Tensor]) -> None:
        X, y = batch
        with parts.profile("transfer"):
            X_shards, y_shards = split(X), split(y)
        with parts.profile("forward"):
            losses: list[Any] = [
                F.cross_entropy(replica(X_shard), y_shard, reduction="sum") / len(y)
                for replica, X_shard, y_shard in zip(replicas, X_shards, y_shards)
            ]
        with parts.profile("backward"):
            for loss in losses:
                loss.backward()
        with parts.profile("allreduce"):
            for copies in parameters:
                textbook_allreduce([parameter.grad for parameter in copies])
        with parts.profile("update"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return train_batch


def measure_loop(configuration: Configuration, data: FashionMNIST) -> dict[str, Any]:
    """Measure the loop by hand."""
    data.prepare_data()
    data.setup("fit")
    model = make_model(configuration.model)
    num_replicas = configuration.replicas or configuration.devices
    available = gpus()[: configuration.devices] or [torch.device("cpu")]
    devices = [available[i % len(available)] for i in range(num_replicas)]
    parts = Parts(finished_clock(devices))
    replicas = [copy.deepcopy(model).to(device).train() for device in devices]
    train_batch = make_train_batch(replicas, parts)
    timer = StepTimer(parts, configuration.num_steps)
    loader = data.train_dataloader()
    loader.pin_memory = copies_faster_from_pinned(devices[0])  # as in the Trainer
    batches = (batch for _ in count() for batch in loader)
    while True:
        with parts.profile("data"):
            batch = next(batches)
        train_batch(batch)
        if timer.count_step():
            return timer.result()


def measure_steps(**arguments: Any) -> dict[str, Any] | None:
    """Measure the `Configuration` of these arguments."""
    configuration = Configuration(**arguments)
    torch.set_num_threads(num_cores())
    # then Lightning shares the cores out among the processes of `ddp`
    os.environ.pop("OMP_NUM_THREADS", None)
    seed_everything(0, verbose=False)
    measure = measure_loop if configuration.engine in BY_HAND else measure_strategy
    data = FashionMNIST(batch_size=configuration.batch_size, source="synthetic")
    return measure(configuration, data)


if __name__ == "__main__":
    print_result(measure_steps)
    leave_group()
