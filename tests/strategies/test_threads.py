"""The threads of replicas in a Trainer: side by side, in the modes of the caller, and gone after the run."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_mgpu.strategies  # noqa: F401 (registers them)


class Small(LightningModule):
    """Meets its other replica at a barrier in every step, after the first, which runs in turns."""

    meets = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.meets and batch_idx > 0:
            BARRIER.wait()
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


BARRIER = threading.Barrier(2, timeout=20)


def loader() -> DataLoader:
    X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4)
    return DataLoader(TensorDataset(X, X[:, :2]), 4)


def assert_no_replica_threads() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]


def test_training_steps_run_side_by_side(trainer_on: Any) -> None:
    module = Small()
    module.meets = True
    trainer_on(2).fit(module, loader())
    assert_no_replica_threads()


@pytest.mark.usefixtures("four_threads")
def test_a_fit_gives_the_cores_back(trainer_on: Any) -> None:
    seen: list[int] = []

    class Counts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    trainer_on(2).fit(Counts(), loader())
    assert seen[2:] == [2] * 4
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("fails", [False, True])
def test_replicas_are_freed(trainer_on: Any, fails: bool) -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if fails and batch_idx == 1:
                raise LookupError
            return super().training_step(batch, batch_idx)

    class Refs(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.refs = [weakref.ref(replica) for replica in trainer.strategy.replicas()[1:]]
            self.refs += [weakref.ref(parameter) for ref in self.refs for parameter in ref().parameters()]

    refs, trainer = Refs(), trainer_on(3)
    trainer.callbacks.append(refs)
    try:
        trainer.fit(module := Fails(), loader())
    except LookupError:
        assert fails
    gc.collect()
    assert len(refs.refs) == 6
    assert [ref() for ref in refs.refs] == [None] * 6
    assert module.net.weight.device == torch.device("cpu")
    assert_no_replica_threads()


def test_a_trainer_inside_a_callback_of_another(trainer_on: Any) -> None:
    class Nested(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            torch.manual_seed(1)
            trainer_on(3).fit(Small(), loader())

    torch.manual_seed(0)
    expected, found = Small(), Small()
    found.load_state_dict(expected.state_dict())
    trainer_on(1).fit(expected, loader())
    trainer = trainer_on(2)
    trainer.callbacks.append(Nested())
    trainer.fit(found, loader())
    torch.testing.assert_close(found.net.weight, expected.net.weight, rtol=1e-10, atol=0)
    assert_no_replica_threads()


def test_precision_modes_in_every_replica(trainer_on: Any) -> None:
    seen: list[tuple[Any, ...]] = []

    class Looks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scores = self.net(batch[0].to(self.net.weight.dtype))
            seen.append((torch.get_default_dtype(), scores.dtype, torch.is_grad_enabled()))
            return F.mse_loss(scores, batch[1].to(scores.dtype))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            scores = self.net(batch[0].to(self.net.weight.dtype))
            seen.append((torch.get_default_dtype(), scores.dtype, not torch.is_grad_enabled()))

    for precision, expected in (
        ("64-true", (torch.float64, torch.float64, True)),
        ("bf16-mixed", (torch.float32, torch.bfloat16, True)),
        ("bf16-true", (torch.bfloat16, torch.bfloat16, True)),
    ):
        seen.clear()
        trainer_on(2, precision=precision, num_sanity_val_steps=0).fit(Looks().float(), loader(), loader())
        assert seen == [expected] * 12
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.filterwarnings("ignore:.*Anomaly Detection")
def test_profiler_and_anomaly_detection(trainer_on: Any, capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    trainer_on(2, profiler="simple", detect_anomaly=True).fit(Small(), loader())

    class Bad(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch[0]) * 0).sqrt().sum() * 0

    with pytest.raises(RuntimeError, match="nan values"):
        trainer_on(2, detect_anomaly=True).fit(Bad(), loader())
    assert_no_replica_threads()
