"""Samples that are left out."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.strategies.conftest import Net, assert_close, attempt, fit, run_in_processes, samples


class Damaged(Dataset):
    """Every fifth sample cannot be read."""

    def __len__(self) -> int:
        return 57

    def __getitem__(self, index: int) -> Any:
        return None if index % 5 == 2 else samples()[index]


def leave_out(batch: list[Any]) -> Any:
    return default_collate([each for each in batch if each is not None])


def damaged() -> DataLoader:
    return DataLoader(Damaged(), 10, collate_fn=leave_out)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Weighted(Validated):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": len(batch[0])}


class Filters(Validated):
    """A hook that leaves out rows."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_used = batch[0][:, 0] > -0.5
        return [part[is_used] for part in batch]


class FiltersWeighted(Filters, Weighted):
    pass


class FiltersValidation(Filters):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_used = self.trainer.validating
        return super().on_after_batch_transfer(batch, dataloader_idx) if is_used else batch


RUNS: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "damaged": (Validated, lambda: {"val": damaged()}),
    "filtered": (FiltersValidation, lambda: {"val": DataLoader(samples(), 10)}),
    "damaged, trained": (Weighted, lambda: {"data": damaged(), "val": damaged()}),
    "filtered, trained": (FiltersWeighted, lambda: {"val": DataLoader(samples(), 10)}),
}
LEFT_OUT = 'The loss of a shard needs a weight, {"loss": loss, "weight": n}: samples were left'
REFUSED: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "damaged": (Validated, lambda: {"data": damaged()}),
    "filtered": (Filters, dict),
}


def fit_run(name: str, replicas: int | None = None, runs: Any = RUNS) -> Any:
    make, kwargs = runs[name]
    return attempt(fit, make, replicas=replicas, **kwargs())


def run_all() -> list[dict[str, Any]]:
    return [{name: fit_run(name, None, each) for name in each} for each in (RUNS, REFUSED)]


@pytest.fixture(scope="module")
def in_two_processes() -> list[Any]:
    return run_in_processes(2, run_all)


@pytest.mark.parametrize("name", RUNS)
def test_training_and_evaluation_are_those_of_one_device(
    name: str, in_two_processes: list[Any]
) -> None:
    expected = fit_run(name)
    for found in (fit_run(name, 2), *(each[0][name] for each in in_two_processes)):
        assert_close(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_are_left_out_need_a_weight(name: str, in_two_processes: list[Any]) -> None:
    for found in (fit_run(name, 2, REFUSED), *(each[1][name] for each in in_two_processes)):
        assert LEFT_OUT in found, found
        assert "\n" not in found
