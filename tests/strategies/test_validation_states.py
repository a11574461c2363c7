"""What validation leaves on a module for its next step, and what hooks make of it in between."""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.slow


def test_a_buffer_that_validation_sets(Regression, trainer_on, make_loader):
    """The first replica's counts."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def validation_step(self, batch, batch_idx):
            self.log("before", self.seen)
            self.seen = batch[0].sum()

    trainer = trainer_on(2)
    trainer.validate(Module(), make_loader(batch_size=12, num_samples=24), verbose=False)
    X = next(iter(make_loader(batch_size=12)))[0]
    assert float(trainer.callback_metrics["before"]) == pytest.approx(float(X[:6].sum()) / 2)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_support_set_of_one_sample(Regression, assert_same_when_validated, make_loader, is_there):
    """In validation, from a loader of its own."""

    class Module(Regression):
        def on_validation_start(self):
            self.prototype = torch.zeros(1, 3, dtype=torch.float64, device=self.device) if is_there else None

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            X, _ = batch
            Z = self.net(X)
            if dataloader_idx == 0:
                self.prototype = Z
            else:
                self.log("distance", (Z - self.prototype).square().mean(), add_dataloader_idx=False)

    loaders = [make_loader(batch_size=1, num_samples=1), make_loader(batch_size=12, num_samples=24)]
    assert_same_when_validated(Module, "distance", loaders)


@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_edits_a_state_of_validation_in_place(Regression, assert_same_when_validated, make_loader, every):
    """Tensors made in inference mode count no changes."""

    class Module(Regression):
        def on_validation_epoch_start(self):
            self.state = torch.zeros(1, 3, dtype=torch.float64, device=self.device)

        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            if batch_idx % every == 0:
                self.state.zero_()

        def validation_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X) + 0.5 * self.state
            self.state = Z
            self.log("error", F.mse_loss(Z, y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])


def test_nan_in_a_state_of_validation_is_no_edit(Regression, assert_same_when_validated, make_loader):
    """Every replica keeps its own."""

    class Module(Regression):
        def on_validation_epoch_start(self):
            self.state = torch.zeros(1, 3, dtype=torch.float64, device=self.device)

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            """One that may edit it, so that it is compared."""

        def validation_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X) + 0.5 * self.state.nan_to_num()
            self.state = torch.where(y > 0, Z, torch.nan)
            self.log("error", F.mse_loss(Z, y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])


ODD = {
    "sparse": lambda h: h.to_sparse(),
    "nested": lambda h: torch.nested.nested_tensor([h, h]),
    "quantized": lambda h: torch.quantize_per_channel(h.float(), torch.ones(3), torch.zeros(3), 0, torch.quint8),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_that_validation_sets(Regression, assert_same_when_validated, make_loader, kind):
    """Kept, though nobody can compare them."""

    class Module(Regression):
        state = None

        def on_validation_batch_start(self, batch, batch_idx):
            pass

        def validation_step(self, batch, batch_idx):
            X, y = batch
            self.state = ODD[kind](torch.eye(3, dtype=torch.float64))
            self.log("error", F.mse_loss(self.net(X), y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])
