"""Samples that are left out; a loss then needs a weight."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.cases import Case, Validated, Weighted, check
from tests.strategies.conftest import samples


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


class WeightedValidated(Weighted, Validated):
    pass


class Filters(Validated):
    """A hook that leaves out rows."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_used = batch[0][:, 0] > -0.5
        return [part[is_used] for part in batch]


class FiltersWeighted(Weighted, Filters):
    pass


class FiltersValidation(Filters):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_used = self.trainer.validating
        return super().on_after_batch_transfer(batch, dataloader_idx) if is_used else batch


LEFT_OUT = 'The loss of a shard needs a weight, {"loss": loss, "weight": n}: samples were left'
ALL: dict[str, Any] = {"in_one": (2,)}
CASES = {
    "damaged": Case(Validated, lambda: {"val": damaged()}, **ALL),
    "filtered": Case(FiltersValidation, lambda: {"val": DataLoader(samples(), 10)}, **ALL),
    "damaged, trained": Case(
        WeightedValidated, lambda: {"data": damaged(), "val": damaged()}, **ALL
    ),
    "filtered, trained": Case(FiltersWeighted, lambda: {"val": DataLoader(samples(), 10)}, **ALL),
    "damaged, no weight": Case(Validated, lambda: {"data": damaged()}, LEFT_OUT, **ALL),
    "filtered, no weight": Case(Filters, dict, LEFT_OUT, **ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluation_are_those_of_one_device(
    name: str, in_two_processes: Callable
) -> None:
    check(__name__, name, in_two_processes)
