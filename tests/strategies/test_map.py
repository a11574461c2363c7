"""The map in strategies/__init__.py names every stop of a batch, in order."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torchmetrics as tm
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from lightning_mgpu import strategies
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy
from tests.strategies.tiny_runs import DP, IS_SIMULATED, Regression

FILES = Path(strategies.__file__).parent
WAY, BESIDE = str(strategies.__doc__).split("Not on the way")
STOP = re.compile(r" ?\d+\. +([\w.]+)  .*?  ((?:\w+\.py, )*\w+\.py)")
CALLERS = {"train_batch.py", "run_step.py", "gradients.py", "reducing.py"}
CALLERS |= {"manual_allreduce.py", "dp.py"}
# called on the way, but the batch does not stop there
NOT_STOPS = {
    "Memory.begin",
    "Replicas.distrust",
    "Replicas.push_weights",
    "find_weights",
    "refuse_other_optimizers",
    "step_and_follow",
}


class Walk(Callback):
    """Notes the functions that the second batch comes by: their names and files."""

    edits_nothing = True

    def __init__(self) -> None:
        self.stops: dict[str, str] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            sys.setprofile(self.note)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def note(self, frame: Any, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.parent == FILES:
            caller = frame.f_back
            while "context" in caller.f_code.co_filename:  # of a `with`, or of `no_grad`
                caller = caller.f_back
            is_called_inside = Path(caller.f_code.co_filename).parent == FILES
            if not is_called_inside or Path(caller.f_code.co_filename).name in CALLERS:
                name = re.sub(r"^\w*Strategy\.", "", frame.f_code.co_qualname)
                self.stops.setdefault(name, file.name)


class Everything(Regression):
    """Its step comes by every stop."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        self.error = tm.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        Z = self.net(X)
        self.error.update(Z, y)
        loss = F.mse_loss(Z, y)
        self.log("loss", loss)
        return {"loss": loss, "Z": Z.detach()}


def is_stop(name: str, file: str) -> bool:
    """Whether it is a public function, no property, in a file on the way."""
    is_property = isinstance(inspect.getattr_static(TrainBatchStrategy, name, None), property)
    is_public = not any(part.startswith(("_", "<")) for part in name.split("."))
    return is_public and not is_property and name not in NOT_STOPS and f"`{file}`" not in BESIDE


@pytest.mark.skipif(IS_SIMULATED, reason="a backward pass in threads of autograd is not walked")
def test_the_map_names_every_stop_in_order(train, engine):
    walk = Walk()
    train(Everything, 2, callbacks=lambda: [walk], max_steps=2, check=False)
    came_by = [name for name, file in walk.stops.items() if is_stop(name, file)]
    came_by = came_by[came_by.index("optimizer_step") :]
    named = dict(STOP.fullmatch(line).groups() for line in WAY.splitlines() if STOP.fullmatch(line))
    if engine == DP:  # one optimizer makes one update
        del named["Updates.repeat"]
    assert came_by == list(named)
    for name, files in named.items():
        assert walk.stops[name] in files.split(", ")
        assert all((FILES / file).exists() for file in files.split(", "))
