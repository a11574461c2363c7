"""`dp`: training on several devices of one process is that of one device.

Reference runs are Lightning's own. With `-p tests.simulated.devices` the devices differ.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_mgpu.strategies import DataParallelStrategy

IS_SIMULATED = torch._C._get_privateuse1_backend_name() == "sim"
SECOND = torch.device("sim:1" if IS_SIMULATED else "cpu")


def loader(num_samples: int = 27, batch_size: int = 8) -> DataLoader:
    """X (N, 6), classes (N,) in float64. Uneven shards: 8, 8, 8, 3 samples."""
    X = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return DataLoader(TensorDataset(X, X[:, :4].argmax(1)), batch_size)


class Classifier(LightningModule):
    """Logs losses and metrics in all the usual ways."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.metrics = MetricCollection([MulticlassF1Score(4), MulticlassAccuracy(4)])
        self.num_steps = 0
        self.double()

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        assert self.device == X.device
        self.num_steps += 1
        loss = F.cross_entropy(self(X), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.accuracy(self(X), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.metrics.update(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, X: Tensor) -> Tensor:
        for name, weight in zip(self.rnn._flat_weights_names, self.rnn._flat_weights):
            assert weight is getattr(self.rnn, name)
        return self.head(self.rnn(X.reshape(-1, 3, 2))[0][:, -1])


def tied_net() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(6, 4))


def weight_norm_net() -> nn.Module:
    old = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    return nn.Sequential(old, nn.Tanh(), new)


def hooked_net() -> nn.Module:
    net = nn.Linear(6, 4)
    net.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


def compiled_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    net.compile(backend="aot_eager")
    return net


class PenalisedGradient(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, [*self.net.parameters()], create_graph=True)
        return loss + 0.1 * sum(gradient.sum() for gradient in gradients)


class MomentumTeacher(Classifier):
    """Edits parameters in its step, in every shard alike."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).double().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        student: Any = self.net[0]  # type: ignore[index]
        self.teacher.weight.data.lerp_(student.weight.data, 0.1)
        return super().training_step(batch, batch_idx) + (self.teacher(batch[0]) ** 2).mean()


class ShiftedByFirstBatch(Classifier):
    """As ActNorm: a parameter is set to what the first shard says, without a new `_version`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first: Any = self.net[0]  # type: ignore[index]
        first.bias.data.copy_(batch[0].mean().expand(8))
        return super().training_step(batch, batch_idx)


class Gathers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * self.all_gather(batch[0]).sum()


@pytest.fixture
def fit(make_trainer: Callable[..., Trainer]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The trained module, and what was logged."""

    def run(make: Callable[[], Any], k: int = 1, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        seed_everything(1, verbose=False)
        given = {"max_epochs": 2, "strategy": "dp" if k > 1 else "auto", "devices": k, **kwargs}
        module, trainer = make(), make_trainer(**given)
        trainer.fit(module, loader(), loader(13, 4))
        return module, {**trainer.callback_metrics}

    return run


def assert_same(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-10) -> None:
    found = {name: value.detach().cpu() for name, value in found.items()}
    torch.testing.assert_close(found, {**expected}, rtol=rtol, atol=1e-13)


RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sgd": (Classifier, {}),
    "clipping by norm": (Classifier, {"gradient_clip_val": 0.1}),
    "accumulation": (Classifier, {"accumulate_grad_batches": 3}),
    "lstm": (lambda: Classifier(Recurrent(nn.LSTM)), {}),
    "rnn": (lambda: Classifier(Recurrent(nn.RNN)), {}),
    "a teacher": (MomentumTeacher, {}),
    "tied weights": (lambda: Classifier(tied_net()), {}),
    "weight norm": (lambda: Classifier(weight_norm_net()), {}),
    "a hook on a weight": (lambda: Classifier(hooked_net()), {}),
    "gradients of gradients": (PenalisedGradient, {}),
    "compiled": (lambda: Classifier(compiled_net()), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_that_of_one_device(fit: Callable[..., Any], name: str) -> None:
    make, kwargs = RUNS[name]
    if name == "lstm" and IS_SIMULATED:
        pytest.skip("simulated devices have no fused cells of recurrent layers")
    module, logged = fit(make, 1, **kwargs)
    for k in (2, 3, 4):  # the last batch has three samples
        other, other_logged = fit(make, k, **kwargs)
        assert_same(other.state_dict(), module.state_dict())
        assert_same(other_logged, logged, rtol=1e-6)
        assert other.num_steps == (min(k, 3) + 3 * k) * 2


class Weighted(Classifier):
    """The loss is a mean over samples of some classes, of which a shard may have none."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counted = batch[1] % 3 == self.shift
        loss = F.cross_entropy(self(batch[0])[counted], batch[1][counted])
        return {"loss": loss, "weight": counted.sum()}


def test_weights_count(fit: Callable[..., Any]) -> None:
    """As on one device, where the loss is that mean anyway."""
    module, _ = fit(Weighted)
    for k in (1, 2, 3):
        assert_same(fit(Weighted, k, strategy="dp")[0].state_dict(), module.state_dict())


class CountsNothingAtFirst(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "weight": 0} if batch_idx < 2 else output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        has_gradients = {p.grad is not None for p in self.parameters()}
        assert has_gradients == {self.trainer.fit_loop.batch_idx >= 2}


def test_a_batch_that_counts_nothing_is_left_out(fit: Callable[..., Any]) -> None:
    """No momentum moves the parameters either."""
    for k in (1, 2):
        module, _ = fit(CountsNothingAtFirst, k, strategy="dp", max_epochs=1)
        start, _ = fit(CountsNothingAtFirst, k, strategy="dp", max_epochs=1, limit_train_batches=2)
        assert not torch.equal(start.net[0].weight, module.net[0].weight)
        seed_everything(1, verbose=False)
        assert_same(start.state_dict(), CountsNothingAtFirst().state_dict())


class LogsAfterTheStep(Classifier):
    """Logs in a hook of the whole batch, whose size counts."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].ndim == 0 and outputs["loss"].device == self.device
        self.log("after", batch[0].sum(), on_step=False, on_epoch=True)


def test_hooks_get_the_loss_and_the_size_of_the_batch(fit: Callable[..., Any]) -> None:
    _, logged = fit(LogsAfterTheStep)
    assert_same(fit(LogsAfterTheStep, 3)[1], logged, rtol=1e-6)


class Watched(Classifier):
    """Records what shards are and what they compute with."""

    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4))
        self.register_buffer("running_mean", torch.zeros(2))
        self.shards: list[tuple[int, torch.device, bool]] = []
        self.num_forwards = 0
        self.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.num_forwards += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight: Any = self.net.weight
        self.running_mean[0] += len(batch[0])
        self.running_mean = self.running_mean + torch.tensor([0, len(batch[0])], device=self.device)
        self.shards.append((len(batch[0]), weight.device, weight.is_leaf))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "options", [{"split": [0.7, 0.3]}, {"split": [0.3, 0.7]}, {"parallel_devices": ["cpu"] * 2}]
)
def test_shares_devices_and_copies(fit: Callable[..., Any], options: dict[str, Any]) -> None:
    """All shards but the first have copies, on one device too; buffers are the first shard's."""
    module, _ = fit(Watched, 2, strategy=DataParallelStrategy(**options), max_epochs=1)
    sizes, devices, are_leaves = zip(*module.shards)
    expected = {0.7: (6, 2) * 3 + (2, 1), 0.3: (2, 6) * 3 + (1, 2)}
    assert sizes == expected.get(options.get("split", [0])[0], (4, 4) * 3 + (2, 1))
    assert are_leaves == (True, False) * 4
    assert set(devices[1::2]) == {torch.device("cpu") if "parallel_devices" in options else SECOND}
    assert module.num_forwards == 2 * len(sizes) + 4  # 4 batches of validation
    assert module.running_mean.tolist() == [sum(sizes[::2])] * 2


class Unequal(Classifier):
    """Returns something else for shards of other sizes: 3, 3, 2 samples over three devices."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) == 3 else self.make(loss)


def manual() -> Classifier:
    module = Classifier()
    module.automatic_optimization = False
    return module


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "manual optimization": (manual, {}, "has no manual optimization"),
    "sync_batchnorm": (Classifier, {"sync_batchnorm": True}, "has no sync_batchnorm"),
    "two machines": (Classifier, {"num_nodes": 2}, "runs as one process"),
    "a share too few": (
        Classifier,
        {"strategy": DataParallelStrategy(split=[0.7, 0.3])},
        "needs 3 shares > 0, not [0.7, 0.3]",
    ),
    "a parameter set by each shard": (ShiftedByFirstBatch, {}, "loses edits that differ"),
    "all_gather in a step": (Gathers, {}, "has no all_gather inside a step"),
    "no loss of a shard": (lambda: Unequal(lambda loss: None), {}, "needs a loss of every shard"),
    "a weight of a shard": (
        lambda: Unequal(lambda loss: {"loss": loss, "weight": 1}),
        {},
        "weights of all or none",
    ),
    "weights in a window": (Weighted, {"accumulate_grad_batches": 2}, "takes no weights where"),
    "one device": (Weighted, {"accumulate_grad_batches": 2, "devices": 1}, "takes no weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(fit: Callable[..., Any], name: str) -> None:
    make, kwargs, said = REFUSED[name]
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        fit(make, 3, **kwargs)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_launchers_are_refused(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the processes would train a model of its own."""
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match="runs as one process"):
        make_trainer(strategy="dp", devices=2)
