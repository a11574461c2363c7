"""Training with an exchange. Bits are in tests/test_bits.py."""

import warnings
from zlib import crc32

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mgpu.exchanges import ExchangeStrategy, ef_sign, power_sgd, top_k
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Manual
from tests.strategies.conftest import Net, assert_close, attempt, rank, samples
from tests.strategies.test_parity import Searches
from tests.test_bits import digest, train


class Huge(Net):
    def loss(self, batch):
        factor = torch.inf if self.global_step == 2 and rank() else 1.0
        return super().loss(batch) + factor * self.net[0].bias.sum()

    def on_before_optimizer_step(self, optimizer):
        gradients = [p.grad for p in self.parameters()]
        self.num_nan = sum(bool(gradient.isnan().all()) for gradient in gradients)
        for gradient in gradients:
            gradient.nan_to_num_(0)


def train_huge():
    """How many gradients are NaN, and the exchange's states, before and after step 3."""
    trainers = [train(ExchangeStrategy(top_k), Huge, max_steps=n) for n in (2, 3)]
    return [(each.lightning_module.num_nan, each.strategy._states) for each in trainers]


def test_what_is_not_finite_reaches_all_replicas_and_no_state(in_two_processes):
    for found in in_two_processes(train_huge):
        (num_before, before), (num_after, after) = found
        assert (num_before, num_after) == (0, 4) and len(after) == 4
        for key, data in after.items():
            assert torch.equal(data["residual"], before[key]["residual"]), key


def divides_late(X, state):
    """By zero, in the fourth step."""
    state["steps"] = state.get("steps", 0) + 1
    return sum((yield X)) / (state["steps"] != 4)


def test_a_result_that_is_not_finite_is_an_error():
    said = attempt(train, ExchangeStrategy(divides_late), Net)
    assert "net.0.weight: an exchange produced non-finite values from finite gradients" in said


def test_one_replica_exchanges_with_itself():
    strategies = ManualAllreduceStrategy(), ExchangeStrategy(), ExchangeStrategy(top_k)
    plain, exact, some = (digest(train(each, Net, max_steps=2)) for each in strategies)
    assert plain == exact != some


def add_noise(X, state):
    """A mask that all replicas share, and noise of each replica's own."""
    state["step"] = state.get("step", 0) + 1
    shared = state.name, state["step"], state.seed
    seeds = [crc32(repr(each).encode()) for each in (shared, (*shared, state.replica))]
    mask, noise = (torch.rand(X.shape, generator=torch.Generator().manual_seed(s)) for s in seeds)
    return sum((yield (X + 0.01 * noise) * (mask < 0.5)))


class DrawsBefore(Net):
    """The fit begins with another state of torch's generator."""

    def __init__(self):
        super().__init__()
        torch.rand(1)


def train_with_noise(directory):
    """The seed and the digest of a whole run, of a resumed one, and of one with another seed."""

    def run(make=Net, **kwargs):
        return train(ExchangeStrategy(add_noise), make, **kwargs)

    whole, other = run(max_epochs=2), run(DrawsBefore, max_epochs=2)
    run(max_epochs=1).save_checkpoint(directory / "last.ckpt")
    resumed = run(DrawsBefore, max_epochs=2, resume=directory / "last.ckpt")
    return [(each.strategy._seed, digest(each)) for each in (whole, resumed, other)]


def test_a_resumed_run_keeps_the_seed_of_its_exchange(tmp_path, in_two_processes):
    first, second = in_two_processes(train_with_noise, tmp_path)
    assert first == second
    whole, resumed, other = first
    assert whole == resumed and whole[0] != other[0] and whole[1] != other[1]


def normalize(X, state):
    """The sum of this step and of the one before, divided by its norm, and a bit more."""
    state["sum"], before = sum((yield X)), state.get("sum", 0)
    total = state["sum"] + before
    return total / total.norm() + 0.01


class TwoTypes(Net):
    """Two parameters of float32, of which one gets no gradient, and four of float64."""

    def __init__(self):
        super().__init__()
        net = self.net.double()
        del self.net
        self.scale, self.unused = (torch.nn.Parameter(torch.ones(n)) for n in (3, 2))
        self.net, self.double = net, lambda: self

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def on_train_epoch_start(self):
        self.net[0].weight.requires_grad_(self.trainer.current_epoch == 0)

    def on_before_optimizer_step(self, optimizer):
        self.last = {
            name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None
        }


def train_flat(directory):
    """States and gradients after one step, and after three epochs, whole and resumed."""

    def run(**kwargs):
        strategy = ExchangeStrategy(normalize, flat=True)
        return train(strategy, TwoTypes, DataLoader(samples(40), 10), **kwargs)

    first = run(max_steps=1)
    run(max_epochs=2).save_checkpoint(directory / "last.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        whole = run(max_epochs=3)
    said = [str(each.message) for each in caught]
    resumed = run(max_epochs=3, resume=directory / "last.ckpt")
    found = [(each.strategy._states, each.lightning_module.last) for each in (first, whole)]
    return *found, said, digest(whole), digest(resumed)


def test_flat_sees_all_parameters_of_a_dtype(tmp_path, in_two_processes):
    results = in_two_processes(train_flat, tmp_path)
    assert not isinstance(results[0], str), results
    (states, found), (last_states, last), said, whole, resumed = results[0]
    seed_everything(0, verbose=False)
    net = TwoTypes()
    net.loss(next(iter(DataLoader(samples(40), 10)))).backward()
    single = torch.cat([net.scale.grad, torch.zeros(2)])
    double = torch.cat([p.grad.flatten() for p in net.net.parameters()])
    sums = {key[0]: data["sum"] for key, data in states.items()}
    assert_close(sums, {"torch.float32": single, "torch.float64": double}, rtol=1e-6)
    assert [*found] == [name for name, _ in net.named_parameters() if name != "unused"]
    found = torch.cat([X.flatten() for X in found.values() if X.dtype == torch.float64])
    assert_close(found, double / double.norm() + 0.01)
    assert any("so the state of the exchange is reset" in line for line in said)
    assert "net.0.weight" not in last and len(last_states) == 2
    assert {resumed, whole} == {*results[1][-2:]} == {whole}
    one = ExchangeStrategy(normalize, flat=True)
    said = attempt(train, one, TwoTypes, max_epochs=3, resume=tmp_path / "last.ckpt")
    assert "--trainer.strategy.replicas=1: cannot change" in said and "value, 2." in said


def test_refusals(tmp_path):
    last, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"

    def new(fraction=0.2, **kwargs):
        options = {"fraction": fraction}
        return ExchangeStrategy(**{"exchange": top_k, "options": options, **kwargs})

    trainer = train(new(), Net, max_epochs=1)
    trainer.save_checkpoint(last)
    trainer.save_checkpoint(other)
    for strategy, make, resume, said in [
        (new(0.3), Net, last, "--trainer.strategy.options={'fraction': 0.3}: cannot change when"),
        (new(flat=True), Net, last, "--trainer.strategy.flat=True: cannot change when resum"),
        (new(exchange=ef_sign, options={}), Net, last, "strategy.exchange=lightning_mgpu.exch"),
        (new(), Net, other, "This checkpoint does not contain the state of an exch"),
        (ManualAllreduceStrategy(), Net, last, "contains the state of an exchange: use the"),
        (new(), Manual, None, "support neither manual optimization"),
        (new(), Searches, None, "nor LBFGS"),
    ]:
        found = attempt(train, strategy, make, resume=resume)
        assert said in found and "\n" not in found, found
    for options, said in [
        ({"flat": True, "exchange": power_sgd}, "power_sgd needs matrices"),
        ({"flat": True, "bucket_cap_mb": 4}, "omit `bucket_cap_mb`"),
    ]:
        with pytest.raises(ValueError, match=said):
            ExchangeStrategy(**options)
