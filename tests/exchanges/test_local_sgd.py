"""Weights now and then: beside replicas by hand, with a delay, and errors."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_mgpu.exchanges import ExchangeStrategy, LocalSGDStrategy, top_k
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Manual, Validated
from tests.strategies.conftest import Net, assert_close, attempt, fit, rank, samples
from tests.strategies.test_refusals import LateParameter
from tests.test_bits import Random, digest, train


class ByHand(Manual, Random):
    pass


class Pretrained(Net):
    """Gets its weights after the strategy was set up."""

    def on_train_start(self):
        vector_to_parameters(flat(self) * 1.5, self.parameters())


DILOCO = {"sync_every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
APART = {
    "local_sgd": {"sync_every": 4},
    "diloco": DILOCO,
    "delayed": {"sync_every": 4, "sync_delay": 2, "mix": 0.3},
    "at once": {"sync_every": 1, "sync_delay": 1},
    "always under way": {**DILOCO, "sync_delay": 4},
    "delayed diloco": {**DILOCO, "sync_delay": 2},
    "goes on from X": {"sync_every": 4, "sync_delay": 3, "mix": 0.0},
}


def by_hand(
    sync_every,
    outer_lr=1,
    outer_momentum=0,
    sync_delay=0,
    mix=0.5,
):
    """Two replicas in one process, with torch's own SGD as the outer step."""
    seed_everything(0, verbose=False)
    nets = [Pretrained().double(), Pretrained().double()]
    nets[0].on_train_start()
    nets[1].load_state_dict(nets[0].state_dict())
    common = flat(nets[0]).requires_grad_()
    optimizers = [net.configure_optimizers() for net in nets]
    outer = torch.optim.SGD([common], outer_lr, outer_momentum, nesterov=outer_momentum > 0)

    def differences():
        return common.detach() - (flat(nets[0]) + flat(nets[1])) / 2

    def arrive(sent, mix):
        common.grad = sent
        outer.step()
        for net in nets:
            goes_on = mix * flat(net) + (1 - mix) * common.detach()
            vector_to_parameters(goes_on, net.parameters())

    num_updates, sent = 0, None
    for X, y in [*DataLoader(samples(60), 10)] * 2:
        for net, optimizer, rows in zip(nets, optimizers, (slice(5), slice(5, 10))):
            optimizer.zero_grad()
            net.loss((X[rows], y[rows])).backward()
            optimizer.step()
        num_updates += 1
        if sent is not None and num_updates == sync_delay:
            arrive(sent, mix)
        if num_updates == sync_every:
            num_updates, sent = 0, differences()
            if not sync_delay:
                arrive(sent, 0)
    if sync_delay:
        arrive(sent, mix)  # at the end: what is under way, and then all that has been done
        arrive(differences(), 0)
    return common.detach()


def flat(net):
    return parameters_to_vector(net.parameters()).detach()


class Rates(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * rank())


class Unfreezes(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].bias.requires_grad_(batch_idx > 1)


class FreezesInOne(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].bias.requires_grad_(rank() == 0 or batch_idx < 2)


def equal():
    return ExchangeStrategy(), ManualAllreduceStrategy()


def train_apart(directory):
    new, path = LocalSGDStrategy, directory / "last.ckpt"
    found = {}
    data = DataLoader(samples(60), 10)
    for name, options in APART.items():
        trainer = train(new(**options), Pretrained, data)
        found[name] = flat(trainer.lightning_module)
    found["flat"] = flat(train(new(**DILOCO, flat=True), Pretrained, data).lightning_module)
    found["compressed"] = digest(train(new(4, top_k), Random))
    found["by hand"] = [digest(train(each, ByHand)) for each in equal()]
    trainer = train(new(**DILOCO), max_epochs=1)
    for _ in range(2):
        trainer.save_checkpoint(path)
        found.setdefault("saved", []).append(path.read_bytes())
    resumed = {**DILOCO, "sync_delay": 3, "exchange": top_k}  # in flight at an epoch's end
    for name, epochs, resume in (("a", 1, None), ("b", 3, None), ("c", 3, directory / "a.ckpt")):
        saves = ModelCheckpoint(directory / f"{name}.ckpt", save_last=True)
        kwargs = {"callbacks": saves, "enable_checkpointing": True, "max_epochs": epochs}
        kwargs["resume"] = resume and resume / "last.ckpt"
        trainer = train(new(**resumed), Random, data, **kwargs)
        found.setdefault("resumed", []).append(digest(trainer))
    for strategy in equal():
        found.setdefault("frozen", []).append(attempt(train, strategy, FreezesInOne))
    return found | {
        each.__name__: attempt(train, new(sync_every=4), each)
        for each in (Rates, Unfreezes, LateParameter)
    }


def test_weights_now_and_then(tmp_path, in_two_processes):
    found, other = in_two_processes(train_apart, tmp_path)
    assert isinstance(found, dict), found
    for name, options in APART.items():
        assert_close(found[name], by_hand(**options))
    assert (found["local_sgd"] - found["diloco"]).abs().max() > 1e-3
    assert torch.equal(found["flat"], found["diloco"])
    assert found["compressed"] == other["compressed"]
    assert found["by hand"][0] == found["by hand"][1]
    assert found["saved"][0] == found["saved"][1], "the second one makes no outer step"
    assert found["resumed"][1] == found["resumed"][2]
    for said in found["frozen"]:
        assert "process 1 and process 0 differ in which parameters require a grad" in said
    for name, said in (
        ("Rates", "had different batches, learning rates or trained parameters than process"),
        ("LateParameter", "has a parameter that is not a parameter of the module"),
        ("Unfreezes", "`requires_grad` has changed between two synchronizations of weights"),
    ):
        assert said in found[name] and "\n" not in found[name], found[name]
    said = attempt(train, LocalSGDStrategy(**DILOCO), resume=tmp_path / "last.ckpt")
    assert "--trainer.devices=1: cannot change when resuming" in said and "value, 2." in said


@pytest.mark.parametrize(("every", "num_exchanges"), [(4, 1), (3, 2)])
def test_bytes_that_are_logged(every, num_exchanges, tmp_path):
    """In the last of six steps, of which the third comes before an evaluation."""
    strategy, logger = LocalSGDStrategy(every), CSVLogger(tmp_path)
    options = {"val_check_interval": 0.5, "max_epochs": 1, "logger": logger}
    fit(Validated, val=DataLoader(samples(), 10), strategy=strategy, **options)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        (found,) = filter(None, (row.get("exchange_mb") for row in csv.DictReader(file)))
    num_bytes = 8 * sum(p.numel() for p in Net().parameters())
    assert float(found) == pytest.approx(num_exchanges * num_bytes / 1e6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2, "sync_delay": 3}, "sync_delay=3: must be from 0 to sync_every=2"),
        ({"mix": 0.5}, "mix=0.5: needs a `sync_delay`"),
        ({"outer_step": flat, "outer_lr": 0.5}, "configure the default `outer_step`"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        LocalSGDStrategy(**options)


def test_an_outer_step_is_named():
    found = attempt(train, LocalSGDStrategy(outer_step=lambda mean, state: mean[:0]))
    assert "exact, then outer step tests.exchanges.test_local_sgd.test_an_outer" in found


def test_manual_optimization_is_refused():
    assert "support neither manual optimization" in attempt(train, LocalSGDStrategy(), Manual)
