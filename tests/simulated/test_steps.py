"""Steps of one process wait for no device, and `dp` moves each parameter and gradient once.

The Trainer's own data are not pinned, a wait that is left out: `batch_loader` pins them.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet, ResNet18
from tests.simulated.watch import bytes_held, watched

BATCH = ("copy from pageable host", "the batch")


def strategy(name: str) -> dict[str, Any]:
    """A Trainer's arguments."""
    return {"strategy": name, "devices": 2 if name == "dp" else 1}


ENGINES = pytest.mark.parametrize("engine", ["auto", "dp", "manual_allreduce"])


@pytest.fixture
def steps(make_trainer, monkeypatch):
    """The waits of an epoch's second and third step of four, and the copies of the model moved."""

    def run(module, engine, data=None, **kwargs):
        advance, size = _TrainingEpochLoop.advance, sum(p.nbytes for p in module.parameters())
        images = TensorDataset(torch.rand(16, 1, 28, 28), torch.arange(16) % 10)

        def watch(self, fetcher):
            seen.is_on = self.batch_progress.current.ready in (1, 2)
            advance(self, fetcher)
            seen.is_on = False

        monkeypatch.setattr(_TrainingEpochLoop, "advance", watch)
        trainer = make_trainer(**strategy(engine), limit_val_batches=0, **kwargs)
        assert trainer.strategy.root_device.type == "sim"
        with watched() as seen:
            seen.is_on = False
            trainer.fit(module, data or DataLoader(images, 4))
        # memory that is not pinned is found
        assert data or any(key[0] in BATCH for key in seen.waits)
        waits = {key: n for key, n in seen.waits.items() if data or key[0] not in BATCH}
        return waits, seen.num_bytes / 2 / size

    return run


def adamw(**kwargs: Any) -> LeNet:
    return LeNet(optimizer=lambda params: AdamW(params, 1e-3, **kwargs))


PLAIN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ResNet18": (partial(ResNet18, width=8), {}),
    "16-mixed": (adamw, {"precision": "16-mixed"}),
    "clipping": (adamw, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
}


@ENGINES
@pytest.mark.parametrize("name", PLAIN)
def test_a_step_waits_for_no_device(steps, name, engine):
    """A GradScaler waits once. `dp` sends the model there, gradients back: twice its size."""
    make, kwargs = PLAIN[name]
    waits, moved = steps(make(), engine, **kwargs)
    assert sum(waits.values()) == (2 if name == "16-mixed" else 0), waits
    assert (2 <= moved < 2.1) if engine == "dp" else moved == 0, moved  # and the batch


@ENGINES
@pytest.mark.parametrize("resident", [False, True], ids=["pinned", "resident"])
def test_data_of_this_package_wait_for_no_device(steps, root, resident, engine):
    """Batches from pinned memory, or made on the device; a fused optimizer, too."""
    settings = {"device_resident": resident, "augment": True, "normalize": True}
    data = FashionMNIST(root=str(root), batch_size=4, val_size=101, **settings)
    assert not steps(adamw(fused=True), engine, data, limit_train_batches=4)[0]


def test_nothing_stays_on_the_other_device(steps):
    """The copies go when the step ends, not when Python's collector runs."""
    gc.collect()
    gc.disable()
    try:
        before = bytes_held(1)
        steps(adamw(), "dp")
        assert bytes_held(1) == before
    finally:
        gc.enable()
