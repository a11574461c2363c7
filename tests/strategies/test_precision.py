"""Every precision of the Trainer; low ones to their own accuracy, replicas equal bit for bit."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import (
    Manual,
    Regression,
    a_loader,
    is_second_shard,
    make_strategy,
    ordered_loader,
    sgd,
)
from torch import optim


def in_single(base):
    """A module in float32 whose batches come in its precision."""

    class Single(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.float()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [part.to(self.net[0].weight.dtype) for part in batch]

    return Single


PRECISIONS = [("64-true", 1e-10), ("32-true", 1e-5), ("bf16-mixed", 0.03), ("bf16-true", 0.1)]


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_precisions(assert_parity, precision, tolerance, base):
    class Module(in_single(base)):
        def loss(self, batch):
            assert torch.is_autocast_enabled(self.device.type) == (precision == "bf16-mixed")
            # wherever a replica runs
            assert (torch.get_default_dtype() == torch.float64) == (precision == "64-true")
            return super().loss(batch)

    assert_parity(Module, precision=precision, tolerance=tolerance)


KIND = "sim" if hasattr(torch, "sim") else "cpu"


class Scaled(MixedPrecision):
    """float16 with a GradScaler on the CPU, which Lightning does not offer; gradients overflow."""

    def __init__(self, **kwargs):
        options = {"init_scale": 2.0**8, "growth_factor": 64.0, "growth_interval": 2, **kwargs}
        super().__init__("16-mixed", KIND, torch.amp.GradScaler(KIND, **options))


class TwoOptimizers(Manual):
    """Of one backward pass: the first one's step unscales its gradients."""

    def update(self, loss):
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [optim.AdamW(layer.parameters(), 0.01) for layer in (self.net[0], self.net[2])]


SCALED = [(False, Regression, None), (False, Regression, 0.1), (True, Regression, None)]
SCALED += [(False, Manual, None), (False, TwoOptimizers, None)]


@pytest.mark.parametrize(("fused", "base", "clip"), SCALED)
def test_scaled_gradients(assert_parity, fused, base, clip):
    """The same steps are skipped. The scaler takes part in updates: the others get the first's."""
    scales = []

    class Module(in_single(base)):
        def on_train_end(self):
            scales.append(self.trainer.precision_plugin.scaler.get_scale())

    make = lambda: Module(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01, fused=fused))  # noqa: E731
    kwargs = {"max_epochs": 4, "gradient_clip_val": clip, "own_updates": False}
    assert_parity(make, tolerance=0.03, plugins=lambda: [Scaled()], **kwargs)
    assert scales[0] < 2.0**8 * 64.0**8 and len(set(scales)) == 1


def test_a_skipped_step_changes_nothing(train):
    """One replica's gradient overflows, so the sum does."""

    class Module(in_single(Regression)):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * float("inf" if is_second_shard(batch) else 1)

    kwargs = {"plugins": lambda: [Scaled()], "loader": ordered_loader, "max_epochs": 1}
    module, start = (
        train(lambda: Module(optimizer=sgd), k, **kwargs, max_steps=n) for k, n in ((2, -1), (1, 0))
    )
    assert module.trainer.precision_plugin.scaler.get_scale() == 2.0**6
    torch.testing.assert_close(module.state_dict(), start.state_dict(), rtol=0, atol=0)
    assert not any(optimizer.state for optimizer in module.trainer.optimizers)


@pytest.mark.skipif(KIND != "sim", reason="needs -p tests.simulated.devices")
@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("devices", [["sim:0", "cpu"], ["sim:0", "sim:1", "cpu"]], ids=str)
def test_autocast_reaches_devices_of_every_kind(train, engine, devices, base):
    """Lightning enters it for the first device's kind. The loss is computed in float32 again."""
    dtypes = {}

    class Module(in_single(base)):
        def loss(self, batch):
            Z = self.net(batch[0])
            dtypes.setdefault(str(self.device), set()).add(Z.dtype)
            return (Z.float() - batch[1]).square().mean()

    strategy = make_strategy(engine, parallel_devices=devices)
    train(Module, 1, strategy, precision="bf16-mixed", loader=lambda: a_loader(8, 24))
    assert dtypes == {device: {torch.bfloat16} for device in devices}
