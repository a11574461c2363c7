"""`dp`: training on several devices of one process is that of one device.

Reference runs are Lightning's own. With `-p tests.simulated.devices` the devices differ.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_mgpu.strategies import DataParallelStrategy
from tests.cases import Logs, Manual, Weighted, fit_case
from tests.strategies import test_parity
from tests.strategies.conftest import Net, assert_close, attempt, fit, samples
from tests.strategies.test_refusals import Returns
from tests.strategies.test_weights import by_hand, loader

IS_SIMULATED = torch._C._get_privateuse1_backend_name() == "sim"
SECOND = torch.device("sim:1" if IS_SIMULATED else "cpu")
# shards of `dp` share the attributes of one module;
# simulated devices have no fused cells of an LSTM; the GradScaler of that case is the CPU's
NAMES = [
    name
    for name, case in test_parity.CASES.items()
    if name != "keeps a mask"
    and not (issubclass(case.make, Manual) or (IS_SIMULATED and name in ("lstm", "GradScaler")))
]


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_device(name):
    file, case = test_parity.__name__, test_parity.CASES[name]
    expected = fit_case(file, name)
    for k in (2, 8):
        found = fit_case(file, name, strategy="dp", devices=k)
        assert_close(found, expected, case.rtol, 1e-13 if case.rtol == 1e-10 else None)


class OldLayers(Net):
    """Weights that are not parameters, a second list of them, and a hook that sees the sum."""

    def __init__(self):
        super().__init__()
        self.net[0] = nn.utils.weight_norm(self.net[0])
        self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.rnn = nn.RNN(2, 2, batch_first=True)

    def loss(self, batch):
        for name, weight in zip(self.rnn._flat_weights_names, self.rnn._flat_weights):
            assert weight is getattr(self.rnn, name)
        return super().loss([self.rnn(batch[0].view(-1, 4, 2))[0].flatten(1), batch[1]])


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="aot_eager")


class MomentumTeacher(Net):
    """Edits parameters in its step, in every shard alike."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 16).requires_grad_(False)

    def loss(self, batch):
        self.teacher.weight.data.lerp_(self.net[0].weight.data, 0.1)
        return super().loss(batch) + (self.teacher(batch[0]) ** 2).mean()


class LogsAfter(Logs):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("after", batch[0].sum(), on_step=False, on_epoch=True)


@pytest.mark.parametrize("make", [OldLayers, Compiled, MomentumTeacher, LogsAfter])
def test_modules_train_and_log_as_on_one_device(make):
    val = DataLoader(samples(13, 5), 4)
    state, logged = fit(make, val=val)
    for k in (3, 8):
        found = fit(make, val=val, strategy="dp", devices=k)
        assert_close(found[0], state, atol=1e-13)
        assert_close(found[1], logged, 1e-6, 1e-13)


def test_weights_count():
    """A shard may count nothing, and so may a batch: then no momentum moves the parameters."""
    for k in (1, 2, 3):
        found = fit(Weighted, loader(), strategy="dp", devices=k)
        assert_close(found[0], by_hand(1), atol=1e-13)


class Watched(Net):
    """Records what shards are and what they compute with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.shards = []

    def training_step(self, batch, batch_idx):
        weight, num = self.net[0].weight, len(batch[0])
        self.running_mean[0] += num
        self.running_mean = self.running_mean + torch.tensor([0, num], device=self.device)
        self.shards.append((num, weight.device, weight.is_leaf))
        return self.loss(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"device_shares": [0.7, 0.3]},
        {"device_shares": [0.3, 0.7]},
        {"parallel_devices": ["cpu"] * 2},
    ],
)
def test_shares_devices_and_copies(options):
    """All shards but the first have copies, on one device too; buffers are the first shard's."""
    module, strategy = Watched(), DataParallelStrategy(**options)
    fit(lambda: module, DataLoader(samples(23), 10), strategy=strategy, devices=2, max_epochs=1)
    sizes, devices, are_leaves = zip(*module.shards)
    expected = {0.7: (7, 3) * 2 + (2, 1), 0.3: (3, 7) * 2 + (1, 2)}
    assert sizes == expected.get(options.get("device_shares", [0])[0], (5, 5) * 2 + (2, 1))
    assert are_leaves == (True, False) * 3
    assert set(devices[1::2]) == {torch.device("cpu") if "parallel_devices" in options else SECOND}
    assert module.running_mean.tolist() == [sum(sizes[::2])] * 2


class ShiftedByFirstBatch(Net):
    """As ActNorm: a parameter is set to what the first shard says, without a new `_version`."""

    def loss(self, batch):
        self.net[0].bias.data.copy_(batch[0].mean().expand(16))
        return super().loss(batch)


class Gathers(Net):
    def loss(self, batch):
        return super().loss(batch) + 0 * self.all_gather(batch[0]).sum()


ERRORS = {
    "manual optimization": (Manual, {}, "does not support manual optimization"),
    "sync_batchnorm": (Net, {"sync_batchnorm": True}, "has no sync_batchnorm"),
    "two machines": (Net, {"num_nodes": 2}, "supports only one process"),
    "a share too few": (
        Net,
        {"strategy": DataParallelStrategy(device_shares=[0.7, 0.3])},
        "got device_shares=[0.7, 0.3]: must be 3 positive numbers",
    ),
    "a parameter set by each shard": (ShiftedByFirstBatch, {}, "loses edits of parameters"),
    "all_gather in a step": (Gathers, {}, "does not support all_gather in a step"),
    "no loss of a shard": (lambda: Returns(lambda loss: None), {}, "needs a loss from every shard"),
    "a weight of a shard": (
        lambda: Returns(lambda loss: {"loss": loss, "weight": 1}),
        {},
        "needs a weight for the loss of every shard, or for none",
    ),
    "weights in a window": (Weighted, {"accumulate_grad_batches": 2}, "does not support weights"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refused_in_one_line(name):
    make, kwargs, said = ERRORS[name]
    found = attempt(fit, make, **{"strategy": "dp", "devices": 3, **kwargs})
    assert said in found and "\n" not in found, found


def test_launchers_are_refused(monkeypatch):
    """Each of the processes would train a model of its own."""
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "supports only one process" in attempt(fit, strategy="dp", devices=2)
