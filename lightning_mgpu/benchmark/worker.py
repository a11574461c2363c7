"""Measures one configuration, in a process of its own: `python -m lightning_mgpu.benchmark.worker JSON`.

A stretch of steps is timed as it is, and another one with a clock at every part of a step.
"""

import copy
import importlib
import json
import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_mgpu import models
from lightning_mgpu.benchmark.parts import Parts, PartsProfiler
from lightning_mgpu.benchmark.plan import Configuration
from lightning_mgpu.benchmark.references import LR, book_step, loop_step, run_steps
from lightning_mgpu.benchmark.timing import Timer
from lightning_mgpu.cli.checks import find_strategy
from lightning_mgpu.cli.console import quieten
from lightning_mgpu.cli.suggest import did_you_mean
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.malloc import keep_freed_memory
from lightning_mgpu.runs.devices import own_devices
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy

RESULT = "result: "


class Stretches(Callback):
    """After `warm_up` steps, `num_steps` against the clock, and as many with a clock at every part."""

    def __init__(self, warm_up: int, num_steps: int, profiler: PartsProfiler, lr_factor: int = 1) -> None:
        self.ends = [warm_up, warm_up + num_steps, warm_up + 2 * num_steps]
        self.profiler, self.lr_factor = profiler, lr_factor
        self.seconds: list[float] = []
        self.parts: Parts | None = None
        self.timer = Timer([])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.devices = own_devices(trainer)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= self.lr_factor
        if isinstance(trainer.strategy, TrainBatchStrategy):
            reduce_gradients = trainer.strategy.reduce_gradients

            def timed() -> None:
                if self.parts is None:
                    reduce_gradients()
                else:
                    with self.parts("allreduce"):
                        reduce_gradients()

            trainer.strategy.reduce_gradients = timed  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step not in self.ends:
            return
        if trainer.global_step > self.ends[0]:
            self.seconds.append(self.timer.stop())
        self.timer = Timer(self.devices)
        if trainer.global_step == self.ends[1]:
            self.parts = Parts(self.devices)
            self.profiler.begin(self.parts)
        elif trainer.global_step == self.ends[2]:
            self.profiler.end()


def measure(
    configuration: Configuration, images: dict[str, str], warm_up: int, num_steps: int
) -> dict[str, Any] | None:
    """Seconds of a step, of its parts, and bytes at the peak; `None` in processes other than the first."""
    quieten()
    seed_everything(0, verbose=False)
    data = FashionMNIST(batch_size=configuration.batch_size, **images)  # type: ignore[arg-type]
    model = make_model(configuration.model)
    if configuration.engine in ("loop", "book"):
        return _by_hand(configuration, model, data, warm_up, num_steps)
    profiler = PartsProfiler()
    stretches = Stretches(warm_up, num_steps, profiler, configuration.lr_factor)
    strategy = find_strategy(configuration.engine)
    trainer = Trainer(
        accelerator=configuration.accelerator,
        devices=configuration.devices,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_steps=warm_up + 2 * num_steps,
        max_epochs=-1,
        callbacks=[stretches],
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    memory = _memory_of_all(trainer)
    if not trainer.is_global_zero or stretches.parts is None:
        return None
    return _measurement(configuration, stretches.seconds, stretches.parts, num_steps, memory)


def _by_hand(
    configuration: Configuration, model: nn.Module, data: FashionMNIST, warm_up: int, num_steps: int
) -> dict[str, Any]:
    data.prepare_data()
    data.setup("fit")
    kind = "cuda" if configuration.accelerator in ("gpu", "cuda") else "cpu"
    devices = [torch.device(kind, i) if kind == "cuda" else torch.device(kind) for i in range(configuration.devices)]
    parts = Parts(devices)
    if configuration.engine == "loop":
        step = loop_step(model, devices[0], parts, LR * configuration.lr_factor)
    else:
        replicas = [copy.deepcopy(model).to(device).train() for device in devices]  # get_params
        step = book_step(replicas, parts, LR * configuration.lr_factor)
    num_batches = len(data.train_dataloader())
    batches = (batch for _ in range(-(-(warm_up + 2 * num_steps) // num_batches)) for batch in data.train_dataloader())
    unwatched = Parts(clock=lambda: 0.0)
    run_steps(batches, step, warm_up, unwatched)
    timer = Timer(devices)
    run_steps(batches, step, num_steps, unwatched)
    seconds = [timer.stop()]
    parts.seconds.clear()
    timer.start()
    run_steps(batches, step, num_steps, parts)
    seconds.append(timer.stop())
    return _measurement(configuration, seconds, parts, num_steps, float(_peak_memory()))


def _measurement(
    configuration: Configuration, seconds: list[float], parts: Parts, num_steps: int, memory: float
) -> dict[str, Any]:
    plain, watched = seconds
    return {
        "step": plain / num_steps,
        "samples": configuration.batch_size,
        "parts": parts.of_step(watched, num_steps),
        "memory": memory,
        "threads": torch.get_num_threads(),
    }


def _memory_of_all(trainer: Trainer) -> float:
    """The sum over processes of their peaks; NCCL takes no tensor on the CPU, where the model is by now."""
    own = torch.tensor(float(_peak_memory()), device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(own, reduce_op="sum"))


def _peak_memory() -> int:
    """Bytes of this process at its peak: on its GPUs, or where there are none in main memory."""
    if torch.cuda.is_available() and (
        on_gpus := sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    ):
        return on_gpus
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def make_model(name: str) -> LightningModule:
    """A model of this package by its name, or any LightningModule by its dotted path.

    Raises:
        ValueError: If there is none.
    """
    module, _, attribute = name.rpartition(".")
    own = [each for each in models.__all__ if each != "Classifier"]
    try:
        found = getattr(importlib.import_module(module) if module else models, attribute, None)
    except ImportError as error:
        raise ValueError(f"{error}; give {', '.join(own)} or a path like my_package.MyModel") from None
    if not (isinstance(found, type) and issubclass(found, LightningModule)):
        near = did_you_mean(attribute, own)
        raise ValueError(f"no LightningModule{near}; give {', '.join(own)} or a path like my_package.MyModel")
    return found()


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["malloc"] == "keep":
        keep_freed_memory()
    result = measure(Configuration(**order["configuration"]), order["data"], order["warm_up"], order["num_steps"])
    if result is not None:
        print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
