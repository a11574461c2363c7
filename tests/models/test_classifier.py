"""Logged values equal a computation by hand; schedulers step; a checkpoint reloads in Python.

Layers and parameters have the book's numbers.
"""

from collections import UserDict
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score, MulticlassRecall

from lightning_mgpu.models import Classifier, LeNet, OneCycle, ResNet18
from lightning_mgpu.models.classifier import MeanLoss, compiled_logits


def test_epoch_values_are_means_over_samples(make_data, make_trainer):
    """In the second of two epochs. Labels are smoothed in training, images mirrored otherwise."""
    data = make_data(batch_size=150)  # 402 samples in batches of 150, 150, 102
    model = LeNet(lr=0.0, label_smoothing=0.3, flip_tta=True)
    for parameter in model.parameters():  # so large that batches differ in loss
        torch.nn.init.normal_(parameter, std=0.3)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(model, data)
    logged = {**trainer.callback_metrics, **trainer.test(model, data, verbose=False)[0]}
    net = deepcopy(model.net)
    predictions = torch.cat([batch["probabilities"] for batch in trainer.predict(model, data)])
    for stage in ("train", "val", "test"):
        images = getattr(data, f"{stage}_set")
        X, y = images.read(0, torch.arange(len(images)))
        logits = net(X) if stage == "train" else (net(X) + net(X.flip(-1))) / 2
        loss = F.cross_entropy(logits, y, label_smoothing=0.3 if stage == "train" else 0.0)
        assert float(logged[f"{stage}_loss"]) == pytest.approx(loss.item(), rel=1e-5)
        accuracy = (logits.argmax(1) == y).double().mean().item()
        assert float(logged[f"{stage}_acc"]) == pytest.approx(accuracy, abs=1e-6)
    torch.testing.assert_close(predictions, logits.softmax(1))


def test_mean_loss_keeps_its_digits():
    """Those of float64, and of float32 where the model is in bfloat16."""
    for dtype, value in ((torch.float64, 1 / 3), (torch.bfloat16, 0.5)):
        metric = torch.nn.ModuleList([MeanLoss()]).to(dtype)[0]  # as `bf16-true` does
        for _ in range(300):
            metric.update(torch.tensor(value, dtype=dtype), 200)
        metric.update(torch.tensor(torch.nan, dtype=dtype), 0)
        assert abs(float(metric.compute()) - value) < 1e-15


class OwnLoss(LeNet):
    """Cross-entropy in which class 0 does not count, and class 1 four times."""

    class_weights = torch.tensor([0.0, 4.0, *[1.0] * 8])

    def compute_loss(self, logits, y):
        weights = self.class_weights
        return F.cross_entropy(logits, y, weights), weights[y].sum()


class OwnStep(OwnLoss):
    def training_step(self, batch, batch_idx):
        loss, weight = self.compute_loss(self(batch[0]), batch[1])
        return {"loss": loss, "weight": weight}


@pytest.mark.parametrize("strategy", ["manual_allreduce", "dp"])
def test_a_loss_of_ones_own(strategy, make_data, make_trainer):
    """The logged mean is by its weights, some of them 0. A step of one's own logs no accuracy."""
    data, logged, weights = make_data(batch_size=7, val_size=45), [], []
    for make in (OwnLoss, OwnStep):
        torch.manual_seed(0)
        model, devices = make(init="kaiming"), 3 if strategy == "dp" else 1
        trainer = make_trainer(strategy=strategy, devices=devices, limit_train_batches=3)
        trainer.fit(model, data)
        logged.append(dict(trainer.callback_metrics))
        weights.append(model.net[0].weight)
    torch.testing.assert_close(*weights)
    X, y = data.val_set.read(0, torch.arange(len(data.val_set)))
    expected = F.cross_entropy(model.eval()(X), y, OwnLoss.class_weights)
    assert float(logged[0]["val_loss"]) == pytest.approx(expected.item(), rel=1e-5)
    assert logged[0]["train_acc"] > 0 and not {"train_acc", "train_loss"} & logged[1].keys()


class WithMetrics(LeNet):
    """Two metrics that share their states, if they may; its `setup` does not call ours."""

    def setup(self, stage):
        pass

    def make_metrics(self):
        num = self.num_classes
        return MetricCollection({"f1": MulticlassF1Score(num), "recall": MulticlassRecall(num)})


@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_of_ones_own(devices, make_data, make_trainer):
    """In each stage of the second epoch those of all samples."""
    data, model = make_data(batch_size=150), WithMetrics(lr=0.0, init="kaiming")
    trainer = make_trainer(max_epochs=2, strategy="dp", devices=devices)
    trainer.fit(model, data)
    logged = {**trainer.callback_metrics, **trainer.test(model, data, verbose=False)[0]}
    for stage in ("train", "val", "test"):
        images = getattr(data, f"{stage}_set")
        X, y = images.read(0, torch.arange(len(images)))
        expected = model.make_metrics()(model.net(X), y)
        for name in ("f1", "recall"):
            assert float(logged[f"{stage}_{name}"]) == pytest.approx(float(expected[name]))
    assert len({f"{value:.6f}" for value in expected.values()}) == 2


class Network(nn.Module):
    """As a Hugging Face model, it takes keyword arguments and returns an object."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        Z = self.embedding(input_ids) * attention_mask[..., None]
        return SimpleNamespace(logits=self.head(Z.sum(1)))


class Tokens(Classifier):
    def __init__(self, **kwargs):
        super().__init__(num_classes=3, optimizer=AdamW, **kwargs)
        self.net = Network()


class Pairs(Tokens):
    def inputs_and_target(self, batch):
        ids, mask, y = batch
        return {"input_ids": ids, "attention_mask": mask}, y


ROWS = [(torch.randint(9, (5,)), torch.arange(5) < 2 + i % 4, i % 3) for i in range(14)]


def tokens(name, kind=dict):
    dicts = [dict(zip(("input_ids", "attention_mask", name), row)) for row in ROWS]
    return DataLoader(dicts, 4, collate_fn=lambda samples: kind(default_collate(samples)))


@pytest.mark.parametrize("strategy", ["auto", "dp", "manual_allreduce"])
def test_batches_that_are_dicts(strategy, make_trainer):
    """Their target has one of three names; a `BatchEncoding` is a UserDict."""
    pairs = DataLoader(ROWS, 4)
    loaders = [pairs, *map(tokens, ("labels", "label", "target")), tokens("labels", UserDict)]
    found = []
    for loader in loaders:
        torch.manual_seed(0)
        model = Pairs() if loader is pairs else Tokens()
        trainer = make_trainer(strategy=strategy)
        trainer.fit(model, loader, loader)
        values = {**trainer.callback_metrics, **trainer.test(model, loader, verbose=False)[0]}
        predicted = trainer.predict(model, loader)
        labels = torch.cat([batch["label"] for batch in predicted])
        assert labels.tolist() == [i % 3 for i in range(14)]
        found.append([values, torch.cat([batch["probabilities"] for batch in predicted])])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_batches_that_are_refused(make_trainer):
    rows = DataLoader(ROWS)
    images = DataLoader([{"label": 0}])
    for options, loader, hint in (
        ({}, tokens("y"), "found no target; the batch is a dict of input_ids, attention_mask, y:"),
        (
            {},
            rows,
            r"supports X, \(X, y\) or a dict; the batch is a list of 3: override this method",
        ),
        ({"flip_tta": True}, tokens("label"), "model.flip_tta: need images, not a dict"),
        (
            {},
            images,
            "does not match the signature of self.net: missing a required argument: 'input_",
        ),
    ):
        with pytest.raises(ValueError, match=hint):
            make_trainer().fit(Tokens(**options), loader)
    with pytest.raises(
        ValueError, match=r"model.flip_tta: needs images \(N, C, H, W\), not \(2, 5\)"
    ):
        LeNet(flip_tta=True).eval()(torch.zeros(2, 5))
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        LeNet().compute_loss(torch.zeros(2, 10), torch.tensor([1, -100]))


@pytest.fixture
def rates(make_data, make_trainer):
    def rates(num_epochs=2, num_batches=4, **options):
        """The learning rates of every step."""
        model = LeNet(lr=0.1, **options)
        found = []
        note = lambda *_: found.append(model.optimizers().param_groups[0]["lr"])  # noqa: E731
        model.on_train_batch_start = note
        make_trainer(max_epochs=num_epochs, limit_train_batches=num_batches).fit(model, make_data())
        return found

    return rates


def test_schedulers_step_every_epoch(rates):
    assert rates() == [0.1] * 8
    halve = partial(StepLR, step_size=1, gamma=0.5)
    assert rates(lr_scheduler=halve) == [0.1] * 4 + [0.05] * 4
    assert rates(1, lr_scheduler=halve, lr_interval="step") == [0.1, 0.05, 0.025, 0.0125]
    # By val_loss: with this threshold no epoch is better than the first.
    threshold = {"threshold": 1e6, "threshold_mode": "abs"}
    plateau = partial(ReduceLROnPlateau, factor=0.1, patience=0, **threshold)
    assert rates(3, 1, lr_scheduler=plateau) == pytest.approx([0.1, 0.1, 0.01])


def test_one_cycle_steps_every_batch_and_is_over_when_the_run_is(rates):
    """The package's own rises to the optimizer's rate: a sweep over `lr` compares other runs."""
    for scheduler, highest in ((partial(OneCycleLR, max_lr=0.4), 0.4), (OneCycle, 0.1)):
        found = rates(lr_scheduler=scheduler)
        assert len({*found}) == 8 and max(found) == pytest.approx(highest, rel=0.1)
        assert (found[0], found[-1]) == pytest.approx((highest / 25, highest / 25e4))


class Decay(LambdaLR):
    """A schedule of one's own, whose length is required."""

    def __init__(self, optimizer, total_steps):
        super().__init__(optimizer, lambda step: 1 - step / total_steps)


def decay(optimizer, total_steps=None):
    return Decay(optimizer, total_steps)


@pytest.mark.parametrize("scheduler", [Decay, decay, partial(Decay)])
def test_a_schedule_of_ones_own_gets_the_length_of_the_run(scheduler, rates):
    """It steps in every batch, or gets epochs and steps in every epoch. A given length wins."""
    assert rates(lr_scheduler=scheduler) == pytest.approx([0.1 * (8 - i) / 8 for i in range(8)])
    by_epoch = rates(lr_scheduler=scheduler, lr_interval="epoch")
    assert by_epoch == pytest.approx([0.1] * 4 + [0.05] * 4)
    given = rates(lr_scheduler=partial(scheduler, total_steps=80))
    assert given[-1] == pytest.approx(0.1 * 73 / 80)


class Own(LeNet):
    def __init__(self, make=dict, read=lambda batch: batch):
        super().__init__()
        self.make, self.read = make, read

    def make_metrics(self):
        return self.make()

    def inputs_and_target(self, batch):
        return self.read(batch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"make": lambda: {"acc": MulticlassF1Score(10)}}, "make_metrics: acc is reserved"),
        ({"make": lambda: None}, "make_metrics must return a MetricCollection or a dict"),
        ({"read": lambda batch: batch[0][:2]}, "Own.inputs_and_target must return inputs and a"),
        ({"read": lambda batch: None}, "a tensor of labels, or None; the batch is a tuple of 2"),
        ({"read": lambda batch: [batch[0], batch[1].tolist()]}, "must return inputs and a tensor"),
    ],
)
def test_what_a_subclass_must_not_return(options, said, make_data, make_trainer):
    """The names by which the best checkpoint is chosen; two images, for inputs and labels."""
    with pytest.raises(ValueError, match=said):
        make_trainer().fit(Own(**options), make_data())


def test_mistakes_raise_a_value_error(make_data, make_trainer):
    for kwargs, epochs, said in (
        ({"lr_scheduler": OneCycle}, -1, r"total_steps: unknown length: set trainer\.max_epochs"),
        ({"lr": -1}, 1, r"model\.lr, .*Invalid learning rate: -1"),
        ({"num_classes": 1}, 1, r"logits of shape \(64, 1\): must have two or more columns"),
        (
            {"lr": 0.1, "optimizer": AdamW},
            1,
            r"model\.lr=0\.1 is for SGD: use model\.optimizer\.lr",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            make_trainer(max_epochs=epochs).fit(LeNet(**kwargs), make_data())


def test_the_optimizer_and_its_rate():
    models = [LeNet(), ResNet18(), LeNet(lr=0.3), LeNet(optimizer=AdamW)]
    optimizers = [model.configure_optimizers() for model in models]
    assert [type(optimizer) for optimizer in optimizers] == [SGD, SGD, SGD, AdamW]
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.2, 0.1, 0.3, 0.001]


def test_a_checkpoint_reloads_in_python(make_data, make_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["fit"])
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    args = {"model": {"optimizer": optimizer, "num_classes": 12, "lr_scheduler": "OneCycle"}}
    trainer = make_trainer(limit_train_batches=3)
    cli = LightningCLI(LeNet, args=args, run=False, seed_everything_default=False)
    trainer.fit(cli.model, make_data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert trainer.optimizers[0].param_groups[0]["max_lr"] == 0.01
    model = LeNet.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert model.num_classes == 12 and isinstance(model.optimizer(model.parameters()), AdamW)
    torch.testing.assert_close(model.state_dict(), cli.model.state_dict(), rtol=0, atol=0)


def test_a_channels_last_or_compiled_model_trains_the_same(make_data, make_trainer, monkeypatch):
    graphs = []
    eager = partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", eager)
    compiled_logits.cache_clear()

    def train(**options):
        torch.manual_seed(0)
        model = LeNet(init="kaiming", **options)
        make_trainer(limit_train_batches=3).fit(model, make_data())
        assert model.net[3].weight.is_contiguous() is not options.get("channels_last", False)
        return model.state_dict()

    expected = train()
    torch.testing.assert_close(train(channels_last=True), expected)
    assert not graphs
    torch.testing.assert_close(train(compile=True), expected)
    assert len(graphs) == 1
    compiled_logits.cache_clear()


def test_resnet18_is_the_books():
    """That LeNet is, test_book.py shows: it trains as the chapter's functions do."""
    model, X, shapes = ResNet18(), torch.zeros(2, 1, 28, 28), []
    assert sum(p.numel() for p in model.parameters()) == 11_175_818
    for layer in model.net:
        X = layer(X)
        shapes.append(tuple(X.shape[1:]))
    stem, stages = (64, 28, 28), [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    assert shapes == [stem, stem, stem, *stages, (512, 1, 1), (512,), (10,)]
    shortcuts = [block.conv3 is not None for stage in model.net[3:7] for block in stage]
    assert shortcuts == [False, False, True, False, True, False, True, False]
    assert ResNet18(width=16).net[6][1].conv2.weight.shape == (128, 128, 3, 3)
    assert ResNet18(in_channels=3, num_classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("model_class", [LeNet, ResNet18])
def test_initial_weights(model_class):
    """N(0, 0.01) as in the book, or of a size that keeps that of the activations."""
    torch.manual_seed(0)
    for layer in model_class().modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            n = layer.weight.numel()
            # four standard errors
            assert layer.weight.std().item() == pytest.approx(0.01, rel=4 / (2 * n) ** 0.5)
            assert abs(layer.weight.mean().item()) < 4 * 0.01 / n**0.5
            assert layer.bias.any() == (model_class is ResNet18)
    assert 0.1 < model_class(init="kaiming")(torch.randn(64, 1, 28, 28)).std().item() < 10
