"""Replicas on the CPU beside others on GPUs, which here are simulated if there are none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanSquaredError

from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy

STRATEGIES = {"dp": DataParallelStrategy, "manual_allreduce": ManualAllreduceStrategy}


@pytest.fixture
def gpus() -> str:
    if torch._C._get_privateuse1_backend_name() == "sim":
        return "sim"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a GPU, or the plugin tests.simulated.devices")


@pytest.mark.parametrize("places", [["cpu", "gpu:0"], ["cpu", "cpu", "gpu:0"], ["gpu:0", "cpu"]], ids=str)
def test_tensors_and_metrics_follow_their_replica(
    Regression: Any, train: Any, engine: str, gpus: str, places: list[str]
) -> None:
    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.metric, self.several = MeanSquaredError(), [MeanSquaredError()]
            self.weights, self.outputs = torch.arange(1.0, 4.0, dtype=torch.float64), []

        def on_fit_start(self) -> None:
            self.weights = self.weights.to(self.device)
            self.several[0].to(self.device)
            self.scale = SimpleNamespace(by=self.weights * 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            X, y = batch
            Z = self.net(X)
            self.log("metric", self.metric(Z.detach(), y))
            self.log("in a list", self.several[0](Z.detach(), y))
            self.outputs.append(Z.detach())
            return ((Z - y).square() * self.weights * self.scale.by).mean()

        def on_train_epoch_end(self) -> None:
            assert torch.cat(self.outputs).device == self.device
            self.outputs.clear()

    strategy = STRATEGIES[engine](parallel_devices=[place.replace("gpu", gpus) for place in places])
    one: LightningModule = train(Module)
    first = places[0].replace("gpu:0", gpus)  # the Trainer's accelerator is its
    accelerator, k = ("gpu" if first == "cuda" else "cpu"), (1 if first == "cpu" else len(places))
    several = train(Module, k, strategy=strategy, check=False, accelerator=accelerator)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(several.state_dict()[name].cpu(), value.cpu(), rtol=1e-10, atol=1e-13)
    for name, value in one.trainer.callback_metrics.items():
        torch.testing.assert_close(several.trainer.callback_metrics[name].cpu(), value.cpu(), rtol=1e-6, atol=0)
