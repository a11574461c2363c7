"""Running statistics are averaged over replicas; of other buffers the first replica's are kept."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mgpu.strategies.buffers import read_buffers
from tests.cases import Case, Weighted, check
from tests.strategies.conftest import Net, assert_close, attempt, fit, rank, samples


class Normalized(Net):
    def __init__(self, last=None):
        layers = [nn.Linear(8, 16), last or nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)]
        super().__init__(nn.Sequential(*layers))
        self.register_buffer("first", torch.zeros(()))

    def on_train_start(self):
        self.classes = [type(self.net[1]).__name__]

    def loss(self, batch):
        self.first = batch[0][0, 0].clone()  # another tensor in each step
        return super().loss(batch)


class Images(Net):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(2, momentum=None, affine=False))
        self.head = nn.Linear(8, 3)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.net(batch[0].view(-1, 2, 2, 2)).flatten(1)), batch[1])


class CountsInForward(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(1))

    def validation_step(self, batch, batch_idx):
        self.num_seen += 1 + rank()


class Averages(Net):
    """Hooks before the backward pass edit a buffer that the next loss reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_edits", torch.ones(()))

    def on_before_zero_grad(self, optimizer):
        self.num_edits += 1

    def on_before_backward(self, loss):
        self.num_edits.data.add_(1)

    def loss(self, batch):
        return super().loss(batch) / self.num_edits.clone()


def data():
    return DataLoader(samples(), 10)


def no_statistics():
    return Normalized(nn.BatchNorm1d(16, track_running_stats=False))


class Counts(Weighted, Normalized):
    """A loss with a weight, that of the samples which count."""


class Still(Normalized):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("empty", torch.empty(0))

    def loss(self, batch):
        self.num_seen += len(batch[0])
        return super().loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def synced(make):
    return Case(make, lambda: {"data": data(), "sync_batchnorm": True}, rtol=1e-9)


CASES = {
    "1d": synced(Normalized),
    "2d": synced(Images),
    "no statistics": synced(no_statistics),
    "weights": synced(Counts),
    "edited": Case(Averages, lambda: {"data": data()}),
    "counts": Case(
        CountsInForward,
        lambda: {"data": data(), "val": data()},
        "num_seen of process 1 differs from process 0",  # what a process writes by itself
    ),
}


def fit_plain(make=Still, **options):
    return attempt(fit, make, data(), **options)


def find_classes():
    """Of the layer while it trains, and afterwards."""
    module = Normalized()
    fit(lambda: module, data(), sync_batchnorm=True, max_epochs=1)
    return [*module.classes, type(module.net[1]).__name__]


def by_hand(k):
    """The layer's statistics after one epoch, of k replicas that start every step alike."""
    torch.manual_seed(0)
    net, layer = Still().double().net[0], nn.BatchNorm1d(16).double()
    for X, _ in [*data()] * 2:
        states = []
        for shard in X.tensor_split(k):
            other = nn.BatchNorm1d(16).double()
            other.load_state_dict(layer.state_dict())
            other(net(shard))
            states.append(other.state_dict())
        mean = {n: torch.stack([each[n].double() for each in states]).mean(0) for n in states[0]}
        layer.load_state_dict(mean)
    return {f"net.1.{name}": value.double() for name, value in layer.state_dict().items()}


def test_plain_batchnorm_and_other_buffers(in_two_processes):
    for result in in_two_processes(fit_plain):
        assert not isinstance(result, str), result
        state, expected = result[0], by_hand(2)
        assert_close({name: state[name].double() for name in expected}, expected)
        assert state["first"] == samples().tensors[0][50, 0]
        sizes = [len(batch[0].tensor_split(2)[0]) for batch in data()]
        assert state["num_seen"] == 2 * sum(sizes) and state["num_seen"].dtype == torch.int32


@pytest.mark.parametrize("name", CASES)
def test_sync_batchnorm_is_one_device(name, in_two_processes):
    """The last batch has shards of 4 and 3 samples."""
    check(__name__, name, in_two_processes)


def test_the_plain_layer_comes_back(in_two_processes):
    assert in_two_processes(find_classes)[0] == ["SyncedBatchNorm", "BatchNorm1d"]


def test_a_buffer_made_in_a_step_is_refused():
    module = nn.Sequential(nn.BatchNorm1d(16))
    num_bytes = sum(buffer.nbytes for buffer in module.buffers())
    assert len(read_buffers(module, num_bytes)) == num_bytes
    module.append(nn.BatchNorm1d(16))  # twice the bytes
    for before in (num_bytes, 0):  # a module may have had no buffer
        with pytest.raises(RuntimeError, match="A step created a buffer"):
            read_buffers(module, before)
