"""What is not supported raises an error that names the fix."""

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Case, Manual, check
from tests.strategies.conftest import Net, fit, make_strategy, new_trainer, rank
from tests.strategies.test_parity import FlatSGD, Searches, half


class LossBackward(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        assert batch_idx == 0  # it is found after the first update
        self.loss(batch).backward()
        optimizer.step()


class Sparse(Net):
    def __init__(self):
        super().__init__(nn.Embedding(10, 3, sparse=True))

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[1]), batch[1])


class Hidden(Net):
    def configure_optimizers(self):
        self.hidden = [nn.Parameter(torch.zeros(3))]
        return torch.optim.SGD([*self.parameters(), *self.hidden], 0.1)


class LateParameter(Net):
    def __init__(self):
        super().__init__()
        self.heads = []

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.heads.append(nn.Linear(8, 3).double())
            self.optimizers().add_param_group({"params": [*self.heads[0].parameters()]})

    def loss(self, batch):
        y = self.net(batch[0]) + sum(head(batch[0]) for head in self.heads)
        return F.cross_entropy(y, batch[1])


class WideGradient(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.scale.grad_dtype = torch.float32

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


class EditsByRank(Net):
    def on_train_epoch_end(self):
        with torch.no_grad():
            self.net[2].bias[1] += 1e-15 * rank()


class GathersParts(Net):
    def on_train_epoch_end(self):
        self.all_gather(torch.zeros(5 - rank()))


class Draws(Net):
    def on_train_epoch_end(self):
        torch.rand(rank() + 1)


class FlatByHand(Manual):
    """Local gradients are added to views of an optimizer's flat gradient."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch))

    def configure_optimizers(self):
        return FlatSGD(self.parameters())


class Returns(Net):
    def __init__(self, make):
        super().__init__()
        self.make, self.num_steps = make, 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        loss = self.loss(batch)
        return self.make(loss) if rank() or self.num_steps == 2 else loss


class Swaps(Net):
    """A hook puts as many parameters, of a layer in a plain list, into the optimizer."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.heads = [nn.Linear(8, 16).double(), nn.Linear(16, 3).double()]
            swapped = [p for head in self.heads for p in head.parameters()]
            self.optimizers().param_groups[0]["params"] = swapped


class Branches(Net):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])

    def loss(self, batch):
        return F.cross_entropy(self.net(self.norms[rank()](batch[0])), batch[1])


class WeighsSome(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "weight": 1.0} if batch_idx == 1 else loss


def error_of(make, said, **options):
    return Case(make, lambda: options, said)


NOT_SYNCED = "An optimizer has a parameter that is not a parameter of the module"
ALL_OR_NONE = "all losses of an optimizer step need one, or none"
CASES = {
    "sparse": error_of(Sparse, "use nn.Embedding(sparse=False)"),
    "hidden": error_of(Hidden, NOT_SYNCED),
    "late": error_of(LateParameter, NOT_SYNCED),
    "swapped": error_of(Swaps, NOT_SYNCED),
    "branches": error_of(Branches, "run different BatchNorm layers", sync_batchnorm=True),
    "wide gradient": error_of(
        WideGradient, "A torch.float32 gradient of a torch.bfloat16 parameter", **half()
    ),
    "some weights": error_of(WeighsSome, ALL_OR_NONE, accumulate_grad_batches=2),
    "flat gradient": error_of(FlatByHand, "if gradients are views of a larger tensor"),
    "loss.backward()": error_of(LossBackward, "instead of `self.manual_backward(loss)`"),
    "weight 0": error_of(lambda: Returns(lambda loss: {"loss": loss, "weight": 0.0}), ALL_OR_NONE),
    "random numbers by rank": error_of(Draws, "the random state of process"),
    "edited by rank": error_of(EditsByRank, "net.2.bias of process 1 differs from process 0"),
    "parts": error_of(GathersParts, "all_gather of tensors of different shapes"),
    "LBFGS": error_of(Searches, "LBFGS is not supported with several replicas"),
    "another Trainer": Case(
        Net,
        lambda: {"devices": 1, "strategy": make_strategy()},
        "This Trainer uses 1 processes, but 2 were launched",
    ),
    "processes": Case(
        Net,
        lambda: {"strategy": make_strategy(replicas=4)},
        "replicas=4, but 2 processes were launched: launch 4 (--nproc-per-node=4).",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(name, in_two_processes):
    check(__name__, name, in_two_processes)


def test_wrong_options():
    with pytest.raises(ValueError, match="replicas=-1: must be a positive integer"):
        ManualAllreduceStrategy(replicas=-1)
    with pytest.raises(ValueError, match="allreduce=3: must be a callable"):
        ManualAllreduceStrategy(allreduce=3)
    with pytest.raises(MisconfigurationException, match="replicas=3 must be a multiple of 2 dev"):
        new_trainer(strategy=ManualAllreduceStrategy(replicas=3), devices=2)


@pytest.mark.parametrize("replicas", [2, None])
def test_replicas_share_no_gpu(replicas):
    devices = ["cuda:0"] if replicas else ["cuda:1", "cuda:1"]
    strategy = ManualAllreduceStrategy(replicas=replicas, parallel_devices=devices)
    strategy.cluster_environment = LightningEnvironment()
    with pytest.raises(MisconfigurationException, match="2 replicas on 1 GPUs: NCCL supports one"):
        strategy._configure_launcher()


def test_one_process_needs_no_launcher_and_no_group():
    trainer = new_trainer(strategy=make_strategy(replicas=1))
    assert trainer.strategy.launcher is None and trainer.world_size == 1
    fit(strategy=make_strategy())
    assert not dist.is_initialized()
