"""`self.log(batch_size=...)`: samples and counts add up over replicas, a constant weighs every batch alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.strategies.recording.batch_sizes import BatchSizes

# Of every step: what the replicas with samples give, the sizes of their shards; up to a factor that stays, the weight
STEPS = {
    "samples": [([2, 2], [2, 2], 4), ([2, 1], [2, 1], 3), ([1], [1], 1), ([2, 2], [2, 2], 4)],
    "tokens": [([14, 14], [2, 2], 4), ([14, 7], [2, 1], 3), ([7], [1], 1), ([14], [2], 2)],
    "unequal tokens": [([9, 4], [2, 2], 13), ([4, 4], [2, 2], 8), ([5], [1], 5)],
    "one": [([1, 1], [2, 2], 1), ([1, 1], [2, 1], 1), ([1], [1], 1), ([1, 1, 1], [2, 1, 1], 1)],
    "the loader's": [([4, 4], [2, 2], 1), ([4, 4], [2, 1], 1), ([4], [1], 1)],
    "as large as a shard": [([2, 2], [2, 2], 1), ([2], [1], 1), ([2, 2], [2, 1], 1)],
    "another constant": [([4, 4], [2, 1], 4), ([6, 6], [2, 1], 6), ([4, 4], [2, 1], 4)],
}


@pytest.mark.parametrize("kind", STEPS)
def test_weights(kind: str) -> None:
    sizes, factors = BatchSizes(), set()
    for given, shards, expected in STEPS[kind]:
        weights, total = sizes.of_batch("loss", given, shards)
        factors.add(total / expected)
        is_count = kind in ("samples", "tokens", "unequal tokens")
        relative = given if is_count else shards
        assert [weight / sum(weights) for weight in weights] == [n / sum(relative) for n in relative]
    assert len(factors) == 1


@pytest.mark.slow
@pytest.mark.parametrize("constant", [1, 2, 3, 4, 7, 32])
def test_constants(assert_same: Callable[..., None], constant: int) -> None:
    """Steps and epochs are those of one device: shards are uneven, and some batches do not reach all replicas."""

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_value", X.mean(), batch_size=constant, on_step=stage == "train", on_epoch=True)

    assert_same(step)


@pytest.mark.slow
@pytest.mark.parametrize("constant", [1, 2, 4])
def test_last_batch_of_one_sample(Regression: Any, train: Callable, make_loader: Callable, constant: int) -> None:
    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.loss(batch)
            self.log("loss", loss, batch_size=constant, on_step=True, on_epoch=True)
            self.log("samples", loss, batch_size=len(batch[0]), on_step=False, on_epoch=True)
            return loss

    one, *others = (train(Module, k, loader=make_loader(4, 13)).trainer.callback_metrics for k in (1, 2, 3))
    for other in others:
        torch.testing.assert_close(dict(other), dict(one), rtol=1e-6, atol=0)
