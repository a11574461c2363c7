"""What a strategy of one's own keeps from step to step is in its checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy, manual_allreduce


class HalfLater(ManualAllreduceStrategy):
    """Exchanges half of what there is, and keeps the rest for the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def reduce_gradients(self) -> None:
        self.gradients.reduce(self.exchange)

    def exchange(self, gradients: list[list[Tensor]]) -> None:
        self.kept = self.kept or [torch.zeros_like(tensors[0]) for tensors in gradients]
        for tensors, kept in zip(gradients, self.kept, strict=True):
            kept.add_(sum(tensors)).div_(2)
            for tensor in tensors:
                tensor.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


class Uneven(ManualAllreduceStrategy):
    """Leaves the last device with its own."""

    def reduce_gradients(self) -> None:
        def exchange(gradients: list[list[Tensor]]) -> None:
            for tensors in gradients:
                tensors[0].add_(tensors[1])

        self.gradients.reduce(exchange)


Fit = Callable[..., tuple[Trainer, LightningModule]]


@pytest.fixture
def fit(make_trainer: Callable[..., Trainer], Regression: Any, make_loader: Callable[..., DataLoader]) -> Fit:
    def fit(strategy: Any, ckpt_path: Path | None = None, **kwargs: Any) -> Any:
        seed_everything(1, verbose=False)
        module = Regression()
        trainer = make_trainer(
            **{"devices": 2, "strategy": strategy, "max_epochs": 2, "limit_val_batches": 0, **kwargs}
        )
        trainer.fit(module, make_loader(), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
        return trainer, module

    return fit


@pytest.fixture
def whole(fit: Fit, tmp_path: Path) -> LightningModule:
    """Trained for two epochs; the first one left `epoch=0.ckpt`."""
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    return fit(HalfLater(), callbacks=[saving], enable_checkpointing=True)[1]


@pytest.mark.parametrize("forgets", [False, True])
def test_resumed(
    forgets: bool, whole: LightningModule, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had not stopped, bit for bit; not if the state is forgotten."""
    if forgets:
        monkeypatch.delattr(HalfLater, "load_state_dict")
    trainer, resumed = fit(HalfLater(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert trainer.global_step == 8
    assert all(map(torch.equal, whole.parameters(), resumed.parameters())) != forgets


@pytest.mark.usefixtures("whole")
def test_under_another_strategy(fit: Fit, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has a state of .*\.HalfLater, which .*\.DataParallelStrategy leaves out"):
        fit(DataParallelStrategy(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert fit("auto", ckpt_path=tmp_path / "epoch=0.ckpt", devices=1)[0].global_step == 8


def test_who_has_none(fit: Fit, tmp_path: Path) -> None:
    """The checkpoint of the strategies here has Lightning's keys; one of weights alone has no state."""
    for strategy, name in (HalfLater(), "own"), ("manual_allreduce", "plain"):
        trainer, _ = fit(strategy)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        trainer.save_checkpoint(tmp_path / f"{name}_weights.ckpt", weights_only=True)
    own, plain = ({path.stem: set(torch.load(path)) for path in tmp_path.glob(f"{name}*")} for name in ("own", "plain"))
    assert own["own"] - plain["plain"] == {"lightning_mgpu_strategy"}
    assert own["own_weights"] == plain["plain_weights"]


def test_after_the_learning_rate_finder(fit: Fit, tmp_path: Path) -> None:
    """Its steps are forgotten, as those of the optimizer are."""
    finder = LearningRateFinder(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    (_, plain), (_, found) = (fit(HalfLater(), callbacks=list(callbacks)) for callbacks in ((), (finder,)))
    assert all(map(torch.equal, plain.parameters(), found.parameters()))


class OneSum(ManualAllreduceStrategy):
    """Adds up on the first device, which updates and sends the weights."""

    replicas_update = False

    def reduce_gradients(self) -> None:
        def exchange(gradients: list[list[Tensor]]) -> None:
            for tensors in gradients:
                tensors[0].add_(tensors[1])

        self.gradients.reduce(exchange)

    def update_replicas(self, n: int) -> None:
        self._replicas.broadcast_parameters()


def test_an_exchange_for_one_update(fit: Fit) -> None:
    (_, one), (_, two) = fit("auto", devices=1), fit(OneSum())
    for expected, got in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


def test_a_wrong_allreduce_in_a_strategy_of_ones_own(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allreduce is blamed."""

    class Timed(ManualAllreduceStrategy):
        def reduce_gradients(self) -> None:
            super().reduce_gradients()

    def first_alone(tensors: list[Tensor]) -> None:
        tensors[0].add_(tensors[1])

    monkeypatch.setattr(manual_allreduce, "check_allreduce", lambda *_: None)
    with pytest.raises(ValueError, match=r"^allreduce .*first_alone left device 1"):
        fit(Timed(first_alone))


def test_an_exchange_that_leaves_replicas_with_others(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"^Uneven\.reduce_gradients left device 1 \(cpu\) with another sum than dev"):
        fit(Uneven())
