"""An allreduce as it is written: the sums of gathered gradients, and errors before training."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu import allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import (
    Net,
    attempt,
    fit,
    no_shared_memory,
    run_in_processes,
    samples,
    world_size,
)
from tests.test_bits import Random, digest, train

NAMES = ("textbook", "tree", "ring", "sharded", "halving_doubling", "key_value")


class Several(Net):
    def __init__(self):
        super().__init__()
        self.unused, self.frozen = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.low = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.ones(8, 5).t())
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 8))

    def loss(self, batch):
        X = batch[0] * self.scale * self.low.float()
        X = X + (X @ self.transposed.t()).sum(1, keepdim=True) + (X @ self.empty.t()).sum()
        return super().loss((X, batch[1]))


def sums(name, **options):
    function = getattr(allreduce, f"{name}_allreduce")
    strategy = partial(ManualAllreduceStrategy, function, **options)
    kwargs = {"max_epochs": 2, "accumulate_grad_batches": 2}
    found = [digest(train(strategy(), Random, None, **kwargs))]
    X, y = samples().tensors
    data = DataLoader(TensorDataset(X.float(), y), 10)
    state = fit(Several, data, strategy=strategy(), precision=None)[0]
    return [*found, {key: X.double().tolist() for key, X in state.items()}]


def compare():
    for name in {3: ("ring",), 2: ("tree", "ring")}.get(world_size(), NAMES):
        gathered = sums(name)
        for megabytes in (0.0001, 4):
            assert sums(name, as_written=True, bucket_cap_mb=megabytes) == gathered, name
    with no_shared_memory():
        assert sums(name, as_written=True) == gathered, name


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_sums_are_those_of_gathered_gradients(k):
    assert run_in_processes(k, compare) == [None] * k


def branches(tensors):
    if tensors[0].sum() > 0:
        allreduce.textbook_allreduce(tensors)


def depends_on_the_rank(tensors):
    function = allreduce.ring_allreduce if torch.distributed.get_rank() else None
    (function or allreduce.sharded_allreduce)(tensors)


def fit_written(name):
    strategy = ManualAllreduceStrategy(globals()[name], as_written=True)
    return attempt(fit, strategy=strategy)


def test_errors_before_training(in_two_processes):
    for found in in_two_processes(fit_written, "branches"):
        assert "test_as_written.py:" in found and "as_written=false" in found, found
    for found in in_two_processes(fit_written, "depends_on_the_rank"):
        assert "an allreduce as written sends different messages" in found, found
