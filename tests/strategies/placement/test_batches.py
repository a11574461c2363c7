"""Batches whose shards are on their devices before hooks see the whole one."""

import pytest
import torch
from lightning.pytorch import Callback

pytestmark = pytest.mark.slow


class Doubles(Callback):
    def on_train_batch_start(self, trainer, module, batch, *_):
        batch[0].mul_(2)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_callback_edits_them_in_place(Regression, trainer_on, make_loader, stage):
    """Made in inference mode, as they are outside of `fit`, they count no changes."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            self.log("squares", batch[0].square().mean())
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_squares", batch[0].square().mean())

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return batch[0].square().mean(1)

    seen = []
    for k in (1, 2, 3):
        trainer = trainer_on(k, callbacks=[Doubles()], max_epochs=1)
        outputs = getattr(trainer, stage)(Module(), *[make_loader()] * (2 if stage == "fit" else 1))
        values = [float(value) for name, value in sorted(trainer.callback_metrics.items())]
        seen.append(torch.cat(outputs).tolist() if stage == "predict" else values)
        assert seen[-1]
    assert seen[1:] == [pytest.approx(seen[0], rel=1e-6)] * 2
