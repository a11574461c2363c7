"""What steps return is joined; samples are evaluated once; predictions come in dataset order."""

import copy

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from tiny_runs import MANUAL, Pair, Regression, Sample, a_loader, assert_close
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# what both strategies share
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)

PREDICTIONS = {
    "tensor": lambda Z, names: Z,
    "dict": lambda Z, names: {"Z": Z, "names": names, "none": None},
    "list of dicts": lambda Z, names: [{"Z": z} for z in Z],
    "tuple of names": lambda Z, names: tuple(names),
    "tuple of dicts": lambda Z, names: tuple({"mean": float(z.mean())} for z in Z),
    "named tuple": lambda Z, names: Pair(Z, names),
    "dataclass": lambda Z, names: Sample(Z, names),
    "array": lambda Z, names: Z.cpu().numpy(),
    "mean as an array": lambda Z, names: np.array(Z.mean().cpu()),
    "two texts a sample": lambda Z, names: [f"{name}{n}" for name in names for n in range(2)],
    "nothing": lambda Z, names: None,
    "nothing found": lambda Z, names: [],
    "nothing inside": lambda Z, names: {"Z": Z, "found": (), "meta": {}},
    "pair of tensors": lambda Z, names: [Z, Z[:, :2]],
    "tokens": lambda Z, names: Z.reshape(-1),
    # as the hidden states of a recurrent layer
    "samples second": lambda Z, names: Z[None].repeat(2, 1, 1),
}


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions(trainer_on, kind):
    """From two loaders, or from one whose shards cannot be taken for layers."""
    loaders = [a_loader(7, 14)] if kind == "samples second" else [a_loader(), a_loader(4, 7)]

    class Predicts(Regression):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return PREDICTIONS[kind](
                self.net(batch[0]), [f"{x:.2f}" for x in batch[1][:, 0].tolist()]
            )

    def predicted(k):
        torch.manual_seed(1)
        return trainer_on(k).predict(Predicts(), loaders)

    expected = predicted(1)
    for k in (2, 3):
        assert_close(predicted(k), expected)


class Watch(Callback):
    """Keeps every batch and what the step returned."""

    def __init__(self):
        self.seen = []

    def keep(self, trainer, module, outputs, batch, *_):
        self.seen.append(copy.deepcopy([outputs, batch]))

    on_train_batch_end = on_validation_batch_end = keep


class Talkative(Regression):
    def training_step(self, batch, batch_idx):
        X, y = batch
        Z = self.net(X)
        return {
            "loss": F.mse_loss(Z, y), "Z": Z.detach(), "tokens": X.reshape(-1),
            "count": (y[:, 0] > 0).sum(), "number": int((y[:, 0] > 0).sum()),
            "mean": float(y.mean()), "names": [f"{x:.2f}" for x in y[:, 0]],
            "nested": {"pair": (y, X)}, "none": None,
        }  # fmt: skip

    validation_step = training_step


def test_callbacks_see_whole_batches_and_outputs(train):
    watches = {k: Watch() for k in (1, 2, 3)}
    for k, watch in watches.items():
        train(Talkative, k, callbacks=lambda watch=watch: [watch], val=True)
    assert len(watches[1].seen) == 2 * 8
    for k in (2, 3):
        assert_close(watches[k].seen, watches[1].seen)


JOINED = {  # what a step returns of rows (N, 2), and what two shards of two and one become
    "means": (lambda X: X.mean(), lambda X: X.mean()),
    "means as numbers": (lambda X: float(X.mean()), lambda X: float(X.mean())),
    "counts": (lambda X: torch.tensor(len(X)), lambda X: torch.tensor(3)),
    "counts as numbers": (lambda X: len(X), lambda X: 3),
    "one shard has it": (lambda X: X[:, 0] if len(X) == 2 else None, lambda X: X[:2, 0]),
    "the same name": (lambda X: "same", lambda X: "same"),
    "squeezed": (lambda X: X[:, 0].squeeze(), lambda X: X[:, 0]),
    "flags": (lambda X: len(X) == 1, lambda X: True),
    "flags in tensors": (lambda X: torch.tensor(len(X) == 1), lambda X: torch.tensor(True)),
    "one shard has the key": (lambda X: {"a": 1} if len(X) == 1 else {}, lambda X: {"a": 1}),
    "of another length": (lambda X: X[:, : len(X)], lambda X: [X[:2], X[2:, :1]]),
    "anything": (lambda X: "x" * len(X), lambda X: ["xx", "x"]),
    "arrays": (lambda X: X.cpu().numpy()[:, 0], lambda X: np.array(X[:, 0])),
}


@pytest.mark.parametrize("name", JOINED)
def test_how_shards_become_one_result(trainer_on, name):
    of_shard, of_batch = JOINED[name]
    X = torch.arange(6, dtype=torch.float64).view(3, 2)

    class Returns(Regression):
        def predict_step(self, batch, batch_idx):
            return of_shard(batch[0])

    [found] = trainer_on(2).predict(Returns(), DataLoader(TensorDataset(X), 3))
    assert_close(found, of_batch(X))


@pytest.mark.parametrize("output", [5.0, "loss", [1.0], {"a": 5}])
@pytest.mark.parametrize("num_samples", [1, 4])
def test_lightning_refuses_what_a_step_returns(trainer_on, output, num_samples):
    class Returns(Regression):
        def training_step(self, batch, batch_idx):
            return output

    with pytest.raises(
        MisconfigurationException, match=r"`training_step` (must return|returns a dict)"
    ):
        trainer_on().fit(Returns(), a_loader(num_samples, num_samples))
