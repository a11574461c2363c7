"""A step waits for no device, moves each gradient there and back, and in few messages.

    python -m pytest -p tests.simulated.devices tests/simulated/test_steps.py

The Trainer's data are not pinned, a wait of its own (`batch_loader` pins them) that is left out.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet, ResNet18
from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy

IS_SIMULATED = hasattr(torch, "sim")
if IS_SIMULATED:
    from tests.simulated.watch import broken_device, bytes_held, watched
pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="needs -p tests.simulated.devices")
BATCH = ("copy from pageable host", "the batch")
STRATEGIES = {"manual_allreduce": ManualAllreduceStrategy, "dp": DataParallelStrategy}
ENGINES = pytest.mark.parametrize("engine", STRATEGIES)


class Manual(LeNet):
    """Optimizes by hand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class EditsBuffers(LeNet):
    """Edits one of five buffers in every step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in "abcde":
            self.register_buffer(name, torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.a += 1
        return super().training_step(batch, batch_idx)


class Tokens(LeNet):
    """Gives a metric two rows for every sample."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metric = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].flatten(1)[:, :2].flatten()
        self.metric.update(rows, rows + 1)
        return super().training_step(batch, batch_idx)


class LogsANumber(LeNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", 3.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Asks(LeNet):
    """Waits for the device: the tests must find it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() > 0
        return loss


def adamw(params: Any) -> AdamW:
    return AdamW(params, 1e-3)


class Unknown(SGD):
    """An optimizer of one's own: the first replica's update is copied."""


@pytest.fixture
def steps(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """The waits and messages of an epoch's second and third step of four, or of its first.

    Bytes in copies of the model. In its first and last the replicas are compared.
    """

    def run(
        make: Callable[[], Any], engine: str, k: int = 2, first: bool = False, **kwargs: Any
    ) -> Any:
        num_steps, advance = 0, _TrainingEpochLoop.advance
        options = {"replicas": kwargs.pop("replicas")} if "replicas" in kwargs else {}
        model, given = make(), kwargs.pop("data", None)
        leave_out = () if given else BATCH
        size = sum(p.nbytes for p in model.parameters())
        data = TensorDataset(torch.rand(16, 1, 28, 28), torch.arange(16) % 10)

        def watch(self: Any, fetcher: Any) -> None:
            nonlocal num_steps
            seen.is_on = self.batch_progress.current.ready in ((0,) if first else (1, 2))
            num_steps += seen.is_on
            advance(self, fetcher)
            seen.is_on = False

        monkeypatch.setattr(_TrainingEpochLoop, "advance", watch)
        strategy: Any = STRATEGIES[engine](**options) if k > 1 or options else "auto"
        trainer = make_trainer(strategy=strategy, devices=k, limit_val_batches=0, **kwargs)
        with watched() as seen:
            seen.is_on = False
            trainer.fit(model, given or DataLoader(data, 4))
        assert num_steps == (1 if first else 2)
        waits = {key: n for key, n in seen.waits.items() if key[0] not in leave_out}
        return waits, seen.num_bytes / num_steps / size, seen.messages.total() / num_steps

    return run


PLAIN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "LeNet": (LeNet, {}),
    "AdamW": (lambda: LeNet(optimizer=adamw), {}),
    "ResNet18": (ResNet18, {}),
    "sync_batchnorm": (ResNet18, {"sync_batchnorm": True}),
    "clipping, four replicas": (LeNet, {"gradient_clip_val": 0.1, "replicas": 4}),
    "manual optimization": (Manual, {}),
    "edits a buffer": (EditsBuffers, {}),
    "rows for samples": (Tokens, {}),
}


@ENGINES
@pytest.mark.parametrize("name", PLAIN)
def test_a_step_waits_for_no_device(steps: Callable[..., Any], name: str, engine: str) -> None:
    make, kwargs = PLAIN[name]
    waits, _, _ = steps(make, engine, **kwargs)
    assert not waits


def fast_lenet() -> LeNet:
    return LeNet(
        optimizer=lambda p: AdamW(p, 1e-3, fused=True), lr_scheduler=partial(OneCycleLR, max_lr=0.1)
    )


@pytest.mark.parametrize(("engine", "k"), [("auto", 1), ("manual_allreduce", 2), ("dp", 2)])
@pytest.mark.parametrize("resident", [False, True], ids=["pinned", "resident"])
def test_data_of_this_package_wait_for_no_device(
    steps: Callable[..., Any], root: Path, resident: bool, engine: str, k: int
) -> None:
    """Batches from pinned memory, or made on the device; a fused optimizer and a scheduler, too."""
    settings = {"device_resident": resident, "augment": True, "cutout": 8, "normalize": True}
    data = FashionMNIST(root=str(root), batch_size=4, val_size=101, **settings)
    waits, _, _ = steps(fast_lenet, engine, k, data=data, limit_train_batches=4)
    assert not waits


def test_waits_are_found_on_one_device(steps: Callable[..., Any]) -> None:
    """Loggers get numbers; what the package leaves to Lightning is counted, too."""
    waits, _, _ = steps(Asks, "auto", 1)
    assert list(waits.values()) == [2] and "test_steps.py" in next(iter(waits))[1]


@ENGINES
def test_waits_are_found(steps: Callable[..., Any], engine: str) -> None:
    """A step that waits is found; `self.log` of a number is one copy for all replicas."""
    waits, _, _ = steps(Asks, engine)
    assert sum(waits.values()) == 4 and all("test_steps.py" in place for _, place in waits)
    waits, _, _ = steps(LogsANumber, engine)
    assert sum(waits.values()) == 2


@ENGINES
def test_an_epochs_first_step_waits_once_for_each_comparison(
    steps: Callable[..., Any], engine: str
) -> None:
    """Gradients are compared, and the weights after the replicas' own updates."""
    waits, _, _ = steps(lambda: LeNet(optimizer=adamw), engine, first=True)
    assert sum(waits.values()) == (2 if engine == "manual_allreduce" else 0)


class Hook(Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


MOVED: dict[
    str, tuple[Callable[[], Any], dict[str, Any], float, float]
] = {  # copies of the model, at most
    "SGD": (LeNet, {}, 2, 2),
    "AdamW": (lambda: LeNet(optimizer=adamw), {}, 2, 2),
    "16-mixed": (lambda: LeNet(optimizer=adamw), {"precision": "16-mixed"}, 3, 2),
    "clipping": (LeNet, {"gradient_clip_val": 0.1}, 3, 2),
    "an optimizer of one's own": (lambda: LeNet(optimizer=lambda p: Unknown(p, 0.1)), {}, 4, 3),
    "a hook of one's own": (lambda: LeNet(optimizer=adamw), {"callbacks": [Hook()]}, 4, 3),
    "manual optimization": (lambda: Manual(optimizer=adamw), {}, 4, 4),
}


@ENGINES
@pytest.mark.parametrize("name", MOVED)
def test_what_a_step_moves(steps: Callable[..., Any], name: str, engine: str) -> None:
    """Gradients there and back; optimizer states never, weights only if the first's are copied."""
    make, kwargs, of_manual_allreduce, of_dp = MOVED[name]
    _, moved, _ = steps(make, engine, **kwargs)
    most = of_manual_allreduce if engine == "manual_allreduce" else of_dp
    assert most - 1 < moved < most + 0.05, moved


@ENGINES
def test_messages_of_a_resnet(steps: Callable[..., Any], engine: str) -> None:
    """Buffers, averages, dp's gradients travel together; the book sums parameter by parameter."""
    _, _, messages = steps(ResNet18, engine)
    num_parameters = len(list(ResNet18().parameters()))
    assert messages <= (2 * num_parameters if engine == "manual_allreduce" else 0) + 16


@ENGINES
def test_nothing_stays_on_the_other_device(
    make_trainer: Callable[..., Trainer], engine: str
) -> None:
    """The copies go when training ends, not when Python's collector runs."""
    data = TensorDataset(torch.rand(12, 1, 28, 28), torch.arange(12) % 10)
    trainer = make_trainer(strategy=STRATEGIES[engine](), devices=2, limit_val_batches=0)
    gc.collect()
    gc.disable()
    try:
        before = bytes_held(1)
        trainer.fit(LeNet(optimizer=adamw), DataLoader(data, 4))
        assert bytes_held(1) == before
    finally:
        gc.enable()


def test_a_devices_error_is_not_the_users_mistake(
    main: Callable[..., int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel fails in a step; Lightning waits next. The traceback stays, the status is not 2."""
    options = (
        f"--data.root={root}",
        "--data.val_size=101",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
    )
    with ExitStack() as stack:

        def fails(self: Any, batch: Any, batch_idx: int) -> Tensor:
            stack.enter_context(broken_device())
            return self(batch[0]).mean()

        monkeypatch.setattr(LeNet, "training_step", fails)
        # or the teardown waits, too
        monkeypatch.setattr(Callback, "on_exception", lambda *args: stack.close())
        with pytest.raises(RuntimeError, match="device-side assert triggered") as caught:
            main("fit", *options)
    assert "lightning" in caught.traceback[-1].path.parts  # the wait: it copies the next batch
