"""What acts on values of all replicas: finders, schedulers, evaluations, looks at batches."""

from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.strategies.conftest import Net, assert_close, attempt, fit, run_in_processes, samples


class FollowsSteps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        told = {"scheduler": scheduler, "interval": "step", "monitor": "loss"}
        return [optimizer], [told]


def test_a_scheduler_of_every_step_needs_one_replica_per_process() -> None:
    found = attempt(fit, FollowsSteps, replicas=2)
    assert "A scheduler that follows a value in every step" in found and "\n" not in found


class EvaluatesBoth(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch["a"]) + self.loss(batch["b"]))


class EvaluatesByMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for each in batch.values():
            self.mean.update(each[0][:, 0])
        self.log("mean", self.mean)


def evaluate(sizes: tuple[int, int], make: type[Net]) -> Any:
    loaders = {name: DataLoader(samples(20), size) for name, size in zip("ab", sizes)}
    return attempt(fit, make, None, CombinedLoader(loaders, "min_size"), max_epochs=1)


def evaluate_all() -> list[Any]:
    cases = [((5, 4), EvaluatesBoth), ((4, 4), EvaluatesBoth), ((5, 4), EvaluatesByMetric)]
    return [evaluate(*case) for case in cases]


def test_an_evaluation_of_two_loaders_needs_equal_shares() -> None:
    """Shards of 3 and 2 samples beside shards of 2 and 2; metric objects are exact."""
    expected = evaluate_all()
    for refused, *found in run_in_processes(2, evaluate_all):
        assert "have other shares of their batches" in refused and "\n" not in refused
        assert_close(found, expected[1:], rtol=1e-6)


class Looks(Net):
    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        self.seen = [next(iter(loader))[0] for _ in range(3)]


def look() -> list[bool]:
    module = Looks()
    fit(lambda: module, DataLoader(samples(), 10, shuffle=True), max_epochs=1)
    return [torch.equal(a, b) for a, b in zip(module.seen, module.seen[1:])]


def test_looks_of_one_hook_go_on_from_each_other() -> None:
    assert run_in_processes(2, look) == [[False, False]] * 2
