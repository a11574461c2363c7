"""`{"loss": ..., "weight": n}`: a loss that is a mean over n things counts by n.

The oracle is a loop without Lightning: the mean over all things that a window of batches has.
"""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.strategies.loss import split_loss
from tests.cases import Case, Manual, Weighted, check
from tests.strategies.conftest import Net, samples


def loader():
    """Samples of class 2 do not count. A batch and a shard of the next one have no others."""
    X, y = samples().tensors
    y[20:35] = 2
    return DataLoader(TensorDataset(X, y), 10)


class WeightedManual(Manual, Weighted):
    def training_step(self, batch, batch_idx):
        output, optimizer = Weighted.training_step(self, batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"], weight=output["weight"])
        optimizer.step()


class WeightedPasses(WeightedManual):
    def training_step(self, batch, batch_idx):
        output, optimizer = Weighted.training_step(self, batch, batch_idx), self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(output["loss"], weight=output["weight"])
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def by_passes():
    torch.manual_seed(0)
    net = Net().double()
    optimizer = net.configure_optimizers()
    for i, (X, y) in enumerate([*loader()] * 2):
        if (y != 2).any():
            F.cross_entropy(net.net(X[y != 2]), y[y != 2]).backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def by_hand(window):
    torch.manual_seed(0)
    net = Net().double()
    optimizer = net.configure_optimizers()
    batches = [*loader()] * 2
    for i in (0, 4, 6, 10) if window == 4 else range(12):
        end = min(i + window, 6 if i < 6 else 12)
        X, y = (torch.cat(parts) for parts in zip(*batches[i:end]))
        optimizer.zero_grad()
        if (y != 2).any():  # else the update is left out, and its momentum as well
            F.cross_entropy(net.net(X[y != 2]), y[y != 2]).backward()
            optimizer.step()
    return net.state_dict()


def weighted(make=Weighted, window=1):
    options = {"accumulate_grad_batches": window}
    expected = lambda: (by_hand(window), {})  # noqa: E731
    return Case(make, lambda: {"data": loader(), **options}, expected=expected)


CASES = {
    "one batch": weighted(),
    "a window": weighted(window=4),
    "manual optimization": weighted(WeightedManual),
}
CASES["two passes"] = CASES["manual optimization"]._replace(
    make=WeightedPasses, expected=lambda: (by_passes(), {})
)


@pytest.mark.parametrize("name", CASES)
def test_things_count_alike(name, in_two_processes):
    check(__name__, name, in_two_processes)


def test_losses():
    loss = torch.ones(1)
    assert split_loss(None) == (None, None)
    found, weight = split_loss({"loss": loss, "weight": torch.tensor(3), "a": 1})
    assert found is not None and found.ndim == 0 and weight == 3.0
    assert split_loss(loss)[1] is None
    for wrong in (torch.ones(2), {"loss": 3.0}, 3.0, [loss]):
        with pytest.raises(MisconfigurationException, match="must be a scalar tensor"):
            split_loss(wrong)
    with pytest.raises(MisconfigurationException, match=r"^The weight of a loss has 8 elements: "):
        split_loss({"loss": loss, "weight": torch.ones(8)})
    for number in (-1, float("nan"), float("inf")):
        with pytest.raises(MisconfigurationException, match="must be finite, >= 0"):
            split_loss({"loss": loss, "weight": number})
