"""Training with an exchange, and exchanges of weights now and then. tests/test_bits.py has bits."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_mgpu.exchanges import ExchangeStrategy, LocalSGDStrategy, power_sgd, top_k
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Manual
from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    rank,
    run_in_processes,
    samples,
)
from tests.test_bits import Random, digest, train


class ByHand(Manual, Random):
    pass


class Huge(Net):
    """In step 3 the first layer's gradient is infinite in both replicas."""

    num_losses = 0

    def loss(self, batch: Any) -> Tensor:
        self.num_losses += 1
        factor = torch.inf if self.num_losses in (5, 6) else 1.0
        return super().loss(batch) + factor * self.net[0].bias.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients: list[Any] = [p.grad for p in self.parameters()]
        self.num_nan = sum(bool(gradient.isnan().all()) for gradient in gradients)
        for gradient in gradients:
            gradient.nan_to_num_(0)


def test_what_is_not_finite_reaches_all_replicas_and_no_state() -> None:
    """All results of the step are NaN."""
    before, after = (train(ExchangeStrategy(top_k, replicas=2), Huge, max_steps=n) for n in (2, 3))
    assert before.lightning_module.num_nan == 0 and after.lightning_module.num_nan == 4
    for replica, states in after.strategy._states.items():
        kept = before.strategy._states[replica]
        assert len(states) == 4
        for key, data in states.items():
            assert torch.equal(data["rest"], kept[key]["rest"]), key


def add_noise(X: Tensor, state: Any) -> Any:
    """A mask that all replicas share, and noise of each replica's own."""
    state["step"] = state.get("step", 0) + 1
    shared = state.name, state["step"], state.seed
    seeds = [crc32(repr(each).encode()) for each in (shared, (*shared, state.replica))]
    mask, noise = (torch.rand(X.shape, generator=torch.Generator().manual_seed(s)) for s in seeds)
    return sum((yield (X + 0.01 * noise) * (mask < 0.5)))


class DrawsBefore(Net):
    """The fit begins with another state of torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.rand(1)


def test_a_resumed_run_keeps_the_seed_of_its_exchange(tmp_path: Path) -> None:
    def run(make: Any = Net, **kwargs: Any) -> Any:
        return train(ExchangeStrategy(add_noise, replicas=2), make, **kwargs)

    whole, other = run(max_epochs=2), run(DrawsBefore, max_epochs=2)
    run(max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    resumed = run(DrawsBefore, max_epochs=2, resume=tmp_path / "last.ckpt")
    assert whole.strategy._seed == resumed.strategy._seed != other.strategy._seed
    assert digest(whole) == digest(resumed) != digest(other)


def normalize(X: Tensor, state: Any) -> Any:
    """The sum of this step and of the one before, divided by its norm, and a bit more."""
    state["sum"], before = sum((yield X)), state.get("sum", 0)
    total = state["sum"] + before
    return total / total.norm() + 0.01


class TwoTypes(Net):
    """Two parameters of float32, of which one gets no gradient, and four of float64."""

    def __init__(self) -> None:
        super().__init__()
        net = self.net.double()
        del self.net
        self.scale, self.unused = (torch.nn.Parameter(torch.ones(n)) for n in (3, 2))
        self.net, self.double = net, lambda: self

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.requires_grad_(self.trainer.current_epoch == 0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.last = {
            name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None
        }


def test_flat_sees_all_parameters_of_a_dtype(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        strategy = ExchangeStrategy(normalize, replicas=2, flat=True)
        return train(strategy, TwoTypes, DataLoader(samples(40), 10), **kwargs)

    first = run(max_steps=1)
    seed_everything(0, verbose=False)
    net = TwoTypes()
    net.loss(next(iter(DataLoader(samples(40), 10)))).backward()
    single = torch.cat([net.scale.grad, torch.zeros(2)])
    double = torch.cat([p.grad.flatten() for p in net.net.parameters()])
    for states in first.strategy._states.values():
        assert [key[0] for key in states] == ["torch.float32", "torch.float64"]
        assert_close([data["sum"] for data in states.values()], [single, double], rtol=1e-6)
    found = first.lightning_module.last
    assert [*found] == [name for name, _ in net.named_parameters() if name != "unused"]
    found = torch.cat([X.flatten() for X in found.values() if X.dtype == torch.float64])
    assert_close(found, double / double.norm() + 0.01)
    run(max_epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="so the state of the exchange is reset"):
        whole = run(max_epochs=3)
    assert "net.0.weight" not in whole.lightning_module.last
    assert [len(states) for states in whole.strategy._states.values()] == [2, 2]
    resumed = run(max_epochs=3, resume=tmp_path / "last.ckpt")
    assert digest(resumed) == digest(whole)


class LBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def some_exchange(X: Tensor, state: Any, fraction: float = 0.1) -> Any:
    state["num"] = state.get("num", 0) + 1
    return sum((yield X))


def test_refusals(tmp_path: Path) -> None:
    last, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"

    def new(fraction: float = 0.2, **kwargs: Any) -> ExchangeStrategy:
        options = {"fraction": fraction}
        return ExchangeStrategy(**{"exchange": top_k, "options": options, "replicas": 2, **kwargs})

    trainer = train(new(), Net, max_epochs=1)
    trainer.save_checkpoint(last)
    trainer.save_checkpoint(other)
    for strategy, make, resume, said in [
        (new(0.3), Net, last, "--trainer.strategy.options={'fraction': 0.2}, which must"),
        (new(flat=True), Net, last, "--trainer.strategy.flat=None, which must stay: here"),
        (new(replicas=3), Net, last, "--trainer.strategy.replicas=2, which must stay"),
        (new(exchange=some_exchange), Net, last, "strategy.exchange=lightning_mgpu.exch"),
        (new(), Net, other, "This checkpoint has no exchange's state"),
        (new(replicas=1), Manual, None, "need automatic optimization"),
        (new(), LBFGS, None, "no LBFGS"),
        (LocalSGDStrategy(replicas=2), Net, None, "one replica per process"),
        (LocalSGDStrategy(), Manual, None, "need automatic optimization"),
    ]:
        found = attempt(train, strategy, make, resume=resume)
        assert said in found and "\n" not in found, found
    for make, options, said in [
        (LocalSGDStrategy, {"every": 0}, "every=0"),
        (LocalSGDStrategy, {"every": 2, "delay": 3}, "delay=3: it is from 0 to every=2"),
        (LocalSGDStrategy, {"mix": 0.5}, "mix=0.5: it needs a `delay`"),
        (LocalSGDStrategy, {"outer": flat, "outer_lr": 0.5}, "the default of `outer`"),
        (ExchangeStrategy, {"every": 4}, "every=4: take the strategy exchange_local_sgd or"),
        (ExchangeStrategy, {"flat": True, "exchange": power_sgd}, "power_sgd needs matrices"),
        (ExchangeStrategy, {"flat": True, "bucket_cap_mb": 4}, "leave out `bucket_cap_mb`"),
    ]:
        with pytest.raises(ValueError, match=said):
            make(**options)


class Pretrained(Net):
    """Gets its weights after the strategy was set up."""

    def on_train_start(self) -> None:
        vector_to_parameters(flat(self) * 1.5, self.parameters())


DILOCO = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
APART: dict[str, dict[str, Any]] = {
    "local_sgd": {"every": 4},
    "diloco": DILOCO,
    "delayed": {"every": 4, "delay": 2, "mix": 0.3},
    "at once": {"every": 1, "delay": 1},
    "always under way": {**DILOCO, "delay": 4},
    "delayed diloco": {**DILOCO, "delay": 2},
    "goes on from X": {"every": 4, "delay": 3, "mix": 0.0},
}


def by_hand(
    every: int, outer_lr: float = 1, outer_momentum: float = 0, delay: int = 0, mix: float = 0.5
) -> Tensor:
    """Two replicas in one process, with torch's own SGD as the outer step."""
    seed_everything(0, verbose=False)
    nets: list[Any] = [Pretrained().double(), Pretrained().double()]
    nets[0].on_train_start()
    nets[1].load_state_dict(nets[0].state_dict())
    common = flat(nets[0]).requires_grad_()
    optimizers = [net.configure_optimizers() for net in nets]
    outer = torch.optim.SGD([common], outer_lr, outer_momentum, nesterov=outer_momentum > 0)

    def differences() -> Tensor:
        return common.detach() - (flat(nets[0]) + flat(nets[1])) / 2

    def arrive(sent: Tensor, mix: float) -> None:
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
        if sent is not None and num_updates == delay:
            arrive(sent, mix)
        if num_updates == every:
            num_updates, sent = 0, differences()
            if not delay:
                arrive(sent, 0)
    if delay:
        arrive(sent, mix)  # at the end: what is under way, and then all that has been done
        arrive(differences(), 0)
    return common.detach()


def flat(net: Any) -> Tensor:
    return parameters_to_vector(net.parameters()).detach()


class Rates(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * rank())


class Unfreezes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].bias.requires_grad_(batch_idx > 1)


class FreezesInOne(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].bias.requires_grad_(rank() == 0 or batch_idx < 2)


def equal() -> tuple[ManualAllreduceStrategy, ...]:
    """Two strategies of equal results."""
    return ExchangeStrategy(), ManualAllreduceStrategy()


def train_apart(directory: Path) -> dict[str, Any]:
    new, path = LocalSGDStrategy, directory / "last.ckpt"
    found: dict[str, Any] = {}
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
    for strategy in equal():
        found.setdefault("frozen", []).append(attempt(train, strategy, FreezesInOne))
    return found | {
        each.__name__: attempt(train, new(every=4), each) for each in (Rates, Unfreezes)
    }


def test_weights_now_and_then(tmp_path: Path, in_two_processes: Callable) -> None:
    found, other = in_two_processes(train_apart, tmp_path)
    assert isinstance(found, dict), found
    for name, options in APART.items():
        assert_close(found[name], by_hand(**options))
    assert (found["local_sgd"] - found["diloco"]).abs().max() > 1e-3
    assert torch.equal(found["flat"], found["diloco"])
    assert found["compressed"] == other["compressed"]
    assert found["by hand"][0] == found["by hand"][1]
    assert found["saved"][0] == found["saved"][1], "the second one makes no outer step"
    for said in found["frozen"]:
        assert "process 1, not 0, has other parameters that require a gradient" in said
    for name, said in (
        ("Rates", "process 1, not 0, had other batches, learning rates or parameters"),
        ("Unfreezes", "Between two exchanges of weights, `requires_grad` must not change"),
    ):
        assert said in found[name] and "\n" not in found[name], found[name]
    said = attempt(train, LocalSGDStrategy(**DILOCO), resume=tmp_path / "last.ckpt")
    assert "--trainer.devices=2, which must stay: here it is 1" in said


class Drifts(Net):
    """The second process is late by 6 s, while the first one trains on for 5 s."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 0:
            time.sleep({(1, 3): 6, (0, 4): 5}.get((rank(), batch_idx), 0))


class FailsWhileUnderWay(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("on purpose")


class SavesAlone(Net):
    """The other process sends differences without buffers meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.Sequential(self.net[0], nn.BatchNorm1d(self.net[0].out_features))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank() == 0 and batch_idx == 2:
            self.trainer.save_checkpoint("never.ckpt")


def train_with_delay() -> Any:
    options: Any = {"every": 2, "delay": 1, "timeout": timedelta(seconds=2)}
    failed = attempt(train, LocalSGDStrategy(**options), FailsWhileUnderWay)
    trainer = attempt(train, LocalSGDStrategy(**options), Drifts)
    alone = attempt(train, LocalSGDStrategy(**options), SavesAlone)
    return trainer if isinstance(trainer, str) else (failed, digest(trainer), alone)


def test_a_timeout_counts_from_the_arrival(in_two_processes: Callable) -> None:
    """And a fit that fails while differences are under way leaves nothing for the next one."""
    found, other = in_two_processes(train_with_delay)
    assert found[:2] == other[:2] and "on purpose" in found[0], found
    for each in (found, other):
        assert "only one process saves a checkpoint" in each[2] or "has ended" in each[2], each


def find_rate() -> Any:
    strategy = ExchangeStrategy(top_k)
    return attempt(fit, strategy=strategy, callbacks=LearningRateFinder(update_attr=False))


def test_a_finder_before_an_exchange_with_a_state() -> None:
    first, second = run_in_processes(2, find_rate)
    assert not isinstance(first, str), first
    assert_close(first, second, rtol=1e-15)
