"""The engine's own cost in a step: `python -m lightning_mgpu.benchmark.cost JSON`.

With one thread, two CPU devices compute one after the other. The engine's own cost is a step on two
devices, minus a step on one device, minus what the second device computes, timed in a loop without
a Trainer. It includes the exchange. The layers are tiny, so most of it is Python.
"""

from collections.abc import Sequence
from time import process_time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mgpu.benchmark.processes import Measurement, print_result
from lightning_mgpu.benchmark.report import markdown, not_measured
from lightning_mgpu.benchmark.steps import QUIET

SECOND_UPDATES = {"manual_allreduce": True, "dp": False}
"""Whether the second device makes an update. Under `dp` it gets the first one's weights."""
BATCH_SIZE = 4  # global
WARM_UP = 10  # steps; an epoch's first one also compares the replicas
HEAD = ["", "two devices, ms", "one device, ms", "second device's computation, ms", "own cost, ms"]
EXPLANATION = """
CPU time of a step with AdamW and a global batch of 4. The own cost is the first column minus the
next two. These are low quartiles, of a repeat's steps and of the repeats, not medians: other
programs can only make a step slower. The second device makes no update under `dp`."""


class Layers(LightningModule):
    """`num_layers` layers of 16 to 16 features; with `logs`, every step logs its loss."""

    def __init__(self, num_layers: int, logs: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))
        self.logs = logs

    def training_step(self, X: Tensor) -> Tensor:
        """The loss of a batch, (n, 16)."""
        loss = self.layers(X).square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class StepClock(Callback):
    """CPU seconds of every step. Waiting for a core and loading a batch do not count."""

    edits_nothing = True  # else replicas would get copies of the weights and make no updates

    def __init__(self) -> None:
        self.start, self.seconds = 0.0, list[float]()

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(process_time() - self.start)


def trainer_step(model: Layers, strategy: str, num_devices: int, num_steps: int) -> float:
    """Seconds of a step in the Trainer, on CPU devices."""
    options: Any = {"accelerator": "cpu", "devices": num_devices, "max_epochs": 1, **QUIET}
    trainer = Trainer(strategy=strategy, callbacks=[clock := StepClock()], **options)
    X: Any = torch.randn((WARM_UP + num_steps) * BATCH_SIZE, 16)
    trainer.fit(model, DataLoader(X, BATCH_SIZE))
    return low_quartile(clock.seconds[WARM_UP:])


def bare_step(model: Layers, updates: bool, num_steps: int) -> float:
    """Seconds of a step on one device's half of the batch, in a loop without a Trainer."""
    X, clock = torch.randn(BATCH_SIZE // 2, 16), StepClock()
    optimizer = model.configure_optimizers()
    for _ in range(WARM_UP + num_steps):
        clock.on_train_batch_start()
        model.training_step(X).backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        clock.on_train_batch_end()
    return low_quartile(clock.seconds[WARM_UP:])


def measure_cases(num_steps: int) -> dict[str, dict[str, float]]:
    """Seconds of a step in every case, and right after it of the two steps to subtract."""
    seconds = {}
    for num_layers, logs in ((4, False), (4, True), (30, False), (30, True)):
        for strategy, updates in SECOND_UPDATES.items():
            seconds[f"{strategy}, {num_layers} layers{logs * ', `self.log`'}"] = {
                "two_devices": trainer_step(Layers(num_layers, logs), strategy, 2, num_steps),
                "one_device": trainer_step(Layers(num_layers, logs), "auto", 1, num_steps),
                "second_device": bare_step(Layers(num_layers), updates, num_steps),
            }
    return seconds


def low_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def cost_table(results: Sequence[Measurement]) -> list[str]:
    """Milliseconds of a step in every case, and how many of them are the engine's own."""
    lines = not_measured(results)
    repeats = [repeat for result in results for repeat in result["repeats"] if repeat]
    for rounds in (repeat["rounds"] for repeat in repeats):
        rows = []
        for case in rounds[0]:
            two, one, second = map(low_quartile, zip(*(each[case].values() for each in rounds)))
            cells = (two, one, second, two - one - second)
            rows.append([case, *(f"{seconds * 1e3:.2f}" for seconds in cells)])
        lines += [*markdown("What the engine itself costs in a step", HEAD, rows), EXPLANATION]
    return lines


def measure_cost(num_steps: int, repeats: int) -> dict[str, Any]:
    """The seconds of every case in each of the repeats."""
    torch.set_num_threads(1)
    return {"rounds": [measure_cases(num_steps) for _ in range(repeats)]}


if __name__ == "__main__":
    print_result(measure_cost)
