"""Every precision of the Trainer; the low ones to their own accuracy, with replicas equal bit for bit all the same."""

import contextlib

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import optim


def in_single(Regression):
    class Single(Regression):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.float()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [part.to(self.net[0].weight.dtype) for part in batch]

    return Single


def test_double(Regression, assert_parity):
    class Module(in_single(Regression)):
        def training_step(self, batch, batch_idx):
            assert torch.tensor(1.0).dtype == torch.float64  # in every thread
            return self.loss(batch)

    one, *_ = assert_parity(Module, precision="64-true")
    assert one.net[0].weight.dtype == torch.float64


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.03), ("bf16-true", 0.1)])
def test_low(Regression, assert_parity, precision, tolerance):
    class Module(in_single(Regression)):
        def training_step(self, batch, batch_idx):
            assert torch.is_autocast_enabled("cpu") == (precision == "bf16-mixed")
            return self.loss(batch)

    assert_parity(Module, precision=precision, tolerance=tolerance)


class Scaled(MixedPrecision):
    """float16 with a GradScaler on the CPU, which Lightning does not offer; gradients overflow now and then."""

    def __init__(self):
        super().__init__(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_factor=64.0, growth_interval=2)
        )


@pytest.mark.parametrize(
    ("fused", "manual", "clip"),
    [(False, False, False), (False, False, True), (False, True, False), (True, False, False), (True, True, False)],
)
def test_scaled_gradients(Regression, assert_parity, fused, manual, clip):
    skips = []

    class Module(in_single(Regression)):
        def __init__(self):
            super().__init__(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01, fused=fused))
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def on_train_end(self):
            skips.append(self.trainer.precision_plugin.scaler.get_scale())

    assert_parity(
        Module,
        tolerance=0.03,
        max_epochs=4,
        plugins=lambda: [Scaled()],
        gradient_clip_val=0.1 if clip else None,
        own_updates=not fused,
    )
    assert skips[0] < 2.0**8 * 64.0**8  # steps were skipped
    assert len(set(skips)) == 1  # the same ones


def test_an_optimizer_that_unscales_by_itself(Regression, assert_parity, make_loader):
    """Its copies would step with other scales when the GradScaler's grows in the middle of an epoch."""

    class Growing(MixedPrecision):
        def __init__(self):
            super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2))

        def forward_context(self):
            return contextlib.nullcontext()  # all of it in float64

    assert_parity(
        lambda: Regression(optimizer=lambda module: optim.SGD(module.parameters(), 0.1, fused=True)),
        plugins=lambda: [Growing()],
        loader=make_loader(num_samples=80),
    )


def test_a_skipped_step_changes_nothing(Regression, train):
    class Module(in_single(Regression)):
        def training_step(self, batch, batch_idx):
            before = [parameter.detach().clone() for parameter in self.parameters()]
            if batch_idx > 0:
                assert all(torch.equal(a, b) for a, b in zip(before, self.parameters()))
            return self.loss(batch) * float("inf" if self.odd() else 1)

        def odd(self) -> bool:
            return self is not self.trainer.strategy.original  # one replica's gradient overflows, the sum does

    module: LightningModule = train(Module, 2, plugins=lambda: [Scaled()], max_epochs=1, limit_train_batches=3)
    torch.manual_seed(1)
    assert module.trainer.precision_plugin.scaler.get_scale() == 2.0**5
    assert not any(optimizer.state for optimizer in module.trainer.optimizers)
