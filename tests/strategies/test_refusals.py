"""What does not train right is refused in one line that names the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Case, Manual, check
from tests.routes.test_routes import OwnBackward
from tests.strategies.conftest import Net, fit, make_strategy, new_trainer, rank
from tests.strategies.test_buffers import Averages, Decays
from tests.strategies.test_parity import HalvesGradients, Searches


class LossBackward(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        assert batch_idx == 0  # it is found after the first update
        self.loss(batch).backward()
        optimizer.step()


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(10, 3, sparse=True))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[1]), batch[1])


class Hidden(Net):
    """Only the optimizer knows this parameter."""

    def configure_optimizers(self) -> Any:
        self.hidden = [nn.Parameter(torch.zeros(3))]
        return torch.optim.SGD([*self.parameters(), *self.hidden], 0.1)


class EditsData(Net):
    """A momentum teacher, by `.data`."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_step >= 2:
            self.net[2].bias.data.mul_(0.999)
        return super().loss(batch)


class EditsLate(Net):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_step == 10:
            with torch.no_grad():
                self.net[2].bias.mul_(0.999)
        return loss


class EditsByRank(Net):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.net[2].bias[1] += 1e-15 * rank()


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


class GathersParts(Net):
    """Parts of five and four samples."""

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.zeros(5 - rank()))


class Draws(Net):
    def on_train_epoch_end(self) -> None:
        torch.rand(rank() + 1)


class ZeroesLate(Manual):
    """What it zeroes has been put aside when the window began."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 1:
            optimizer.step()


class Returns(Net):
    """Something else for the second shard of a batch of 10."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.num_steps = make, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_steps += 1
        loss = self.loss(batch)
        return self.make(loss) if rank() or self.num_steps == 2 else loss


def in_one(make: Any, said: str, **options: Any) -> Case:
    return Case(make, lambda: options, said, in_one=(2,), in_two=())


def in_two(make: Any, said: str, arguments: Any = dict) -> Case:
    return Case(make, arguments, said, in_one=())


ONE_REPLICA = "need one replica per process: leave out `replicas`"
ALL_OR_NONE = "all of an update need one, or none"
CASES = {
    "manual optimization": in_one(Manual, ONE_REPLICA),
    "own backward": in_one(OwnBackward, ONE_REPLICA),
    "sync_batchnorm": in_one(Net, ONE_REPLICA, sync_batchnorm=True),
    "sparse": in_one(Sparse, "use nn.Embedding(sparse=False)"),
    "hidden": in_one(Hidden, "An optimizer has a parameter that the module does not have"),
    "edited weights, by .data": in_one(EditsData, "`training_step` edits weights"),
    "edited weights": in_one(EditsLate, "`training_step` edits weights"),
    "edited buffers": in_one(Averages, "A hook has edited buffers within an update"),
    "edited buffers of a window": in_one(  # each replica has its own there
        Decays, "A hook has edited buffers within an update", accumulate_grad_batches=2
    ),
    "edited gradients": in_one(
        HalvesGradients, "A hook has edited gradients", accumulate_grad_batches=3
    ),
    "a scheduler of every step": in_one(FollowsSteps, ONE_REPLICA),
    "SyncBatchNorm": in_one(
        lambda: Net(nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.Linear(16, 3))),
        ONE_REPLICA,
    ),
    "no loss": in_one(lambda: Returns(lambda loss: None), "every shard needs a loss"),
    "a weight": in_one(lambda: Returns(lambda loss: {"loss": loss, "weight": 1.0}), ALL_OR_NONE),
    "replicas": in_two(
        Net, "replicas=3 must be a multiple of the 2 processes", lambda: {"replicas": 3}
    ),
    "old gradients": in_two(ZeroesLate, "call `zero_grad()` of every optimizer right after its"),
    "loss.backward()": in_two(LossBackward, "in the place of `self.manual_backward(loss)`"),
    "weight 0": in_two(lambda: Returns(lambda loss: {"loss": loss, "weight": 0.0}), ALL_OR_NONE),
    "random numbers by rank": in_two(Draws, "draws other random numbers"),
    "edited by rank": in_two(EditsByRank, "net.2.bias of process 1 is not that of process 0"),
    "parts": in_two(GathersParts, "all_gather of tensors of different shapes"),
    "LBFGS": in_two(Searches, "LBFGS decides by the loss"),
    "another Trainer": in_two(
        Net,
        "This Trainer wants 1 of 2 processes",
        lambda: {"devices": 1, "strategy": make_strategy()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(name: str, in_two_processes: Callable) -> None:
    check(__name__, name, in_two_processes)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="replicas=-1: needed is a count of at least 1"):
        ManualAllreduceStrategy(replicas=-1)
    with pytest.raises(ValueError, match="allreduce=3: needed is a function"):
        ManualAllreduceStrategy(allreduce=3)  # type: ignore[arg-type]


def test_one_process_needs_no_launcher_and_no_group() -> None:
    trainer = new_trainer(replicas=2)
    assert trainer.strategy.launcher is None and trainer.world_size == 1
    fit(replicas=2)
    assert not dist.is_initialized()
