"""`training_step` returns a weight, and the strategy may ignore it."""

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_mgpu.callbacks import IgnoredWeight


class Plain(BoringModel):
    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()


class Weighted(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "weight": len(batch)}


class ByHand(Weighted):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "strategy", "devices", "num_warnings"),
    [
        (Weighted, "auto", 1, 1),
        (Weighted, "manual_allreduce", 1, 0),
        (Weighted, "manual_allreduce", 2, 0),
        (Weighted, "dp", 2, 0),
        (Plain, "auto", 1, 0),
        (ByHand, "manual_allreduce", 2, 1),
    ],
)
def test_one_warning(make_trainer, recwarn, make, strategy, devices, num_warnings):
    trainer = make_trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        limit_val_batches=0,
        callbacks=[IgnoredWeight()],
    )
    trainer.fit(make(), DataLoader(RandomDataset(32, 8), 4))
    said = [str(each.message) for each in recwarn if "ignores" in str(each.message)]
    assert len(said) == num_warnings
    assert all("--trainer.strategy=manual_allreduce" in each for each in said)
