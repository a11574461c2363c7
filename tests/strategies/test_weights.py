"""`{"loss": ..., "weight": n}`: a loss that is a mean over n things counts by n.

The oracle is a loop without Lightning: the mean over all things that a window of batches has.
"""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.strategies.loss import split_loss
from tests.strategies.conftest import Net, assert_close, attempt, fit, run_in_processes, samples


def loader() -> DataLoader:
    """Samples of class 2 do not count. A batch and a shard of the next one have no others."""
    X, y = samples().tensors
    y[20:35] = 2
    return DataLoader(TensorDataset(X, y), 10)


class Weighted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_counted = batch[1] != 2
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        loss = (losses * is_counted).sum() / is_counted.sum()  # for 0 / 0, NaN gradients, too
        assert loss.isnan() == (is_counted.sum() == 0)
        return {"loss": loss, "weight": is_counted.sum()}


class Manual(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        output, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"], weight=output["weight"])
        optimizer.step()


RUNS: dict[str, tuple[Any, int]] = {  # with how many batches per window; an epoch has six
    "one batch": (Weighted, 1),
    "a window": (Weighted, 4),
    "manual optimization": (Manual, 1),
}


def by_hand(window: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    optimizer: Any = net.configure_optimizers()
    batches = [*loader()] * 2
    for i in (0, 4, 6, 10) if window == 4 else range(12):
        end = min(i + window, 6 if i < 6 else 12)
        X, y = (torch.cat(parts) for parts in zip(*batches[i:end]))
        optimizer.zero_grad()
        if (y != 2).any():  # else the update is left out, and its momentum as well
            F.cross_entropy(net.net(X[y != 2]), y[y != 2]).backward()
            optimizer.step()
    return net.state_dict()


def fit_run(name: str, replicas: int) -> Any:
    make, window = RUNS[name]
    return attempt(fit, make, loader(), None, replicas, accumulate_grad_batches=window)


def fit_all() -> dict[tuple[str, int], Any]:
    return {(name, k): fit_run(name, k) for name in RUNS for k in (2, 4)}


@pytest.fixture(scope="module")
def in_two_processes() -> Any:
    return run_in_processes(2, fit_all)


@pytest.mark.parametrize("name", RUNS)
def test_things_count_alike(name: str, in_two_processes: list[Any]) -> None:
    expected = by_hand(RUNS[name][1])
    found = [each[name, 2] for each in in_two_processes]
    if name != "manual optimization":
        found += [in_two_processes[0][name, 4], fit_run(name, 1), fit_run(name, 4)]
    for result in found:
        assert not isinstance(result, str), result
        assert_close(result[0], expected)


def test_losses() -> None:
    loss = torch.ones(1)
    assert split_loss(None) == (None, None)
    found, weight = split_loss({"loss": loss, "weight": torch.tensor(3), "a": 1})
    assert found is not None and found.ndim == 0 and weight == 3.0
    assert split_loss(loss)[1] is None
    for wrong in (torch.ones(2), {"loss": 3.0}, 3.0, [loss]):
        with pytest.raises(MisconfigurationException, match="must be a tensor of one number"):
            split_loss(wrong)
    for number in (-1, float("nan"), float("inf")):
        with pytest.raises(MisconfigurationException, match="must be 0 or more"):
            split_loss({"loss": loss, "weight": number})
