"""Training with an exchange: the same bits in any processes, resumed too; and `every`."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from lightning_mgpu.data import batch_loader
from lightning_mgpu.exchanges import ExchangeStrategy, exact, power_sgd, sign, top_k
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    new_trainer,
    rank,
    run_in_processes,
    samples,
    world_size,
)
from tests.strategies.test_bits import Random

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


def train(
    strategy: Any, make: Any = Random, resume: Path | None = None, num: int = 58, **kwargs: Any
) -> Trainer:
    seed_everything(0, verbose=False)
    trainer, module = new_trainer(strategy=strategy, **kwargs), make().double()
    loader = batch_loader(samples(num), 10, trainer, shuffle=True, seed=1)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return trainer


def digest(trainer: Trainer) -> str:
    tensors = trainer.lightning_module.state_dict().values()
    row = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:8]


def train_all(directory: Path) -> dict[str, str]:
    """The last ones go on where fewer processes have stopped."""
    new = ExchangeStrategy
    digests = {"manual": digest(train(ManualAllreduceStrategy(replicas=4)))}
    for each in (exact, top_k, power_sgd, sign):
        digests[each.__name__] = digest(train(new(exchange=each, replicas=4)))
    accumulated = train(new(exchange=top_k, replicas=4), accumulate_grad_batches=4)
    digests["accumulated"] = digest(accumulated)
    for each in (top_k, power_sgd):
        trainer = train(new(exchange=each, replicas=4), max_epochs=1)
        trainer.save_checkpoint(directory / f"{each.__name__}-{world_size()}" / "last.ckpt")
        saved = directory / f"{each.__name__}-{max(1, world_size() // 2)}" / "last.ckpt"
        resumed = train(new(exchange=each, replicas=4), resume=saved)
        digests[f"{each.__name__} resumed"] = digest(resumed)
    return digests


def test_the_same_bits_in_1_2_and_4_processes(tmp_path: Path) -> None:
    one, two, four = (run_in_processes(k, train_all, tmp_path) for k in (1, 2, 4))
    assert isinstance(one[0], dict), one
    assert two == one * 2 and four == one * 4
    assert one[0]["exact"] == one[0]["manual"]
    for name in ("top_k", "power_sgd"):
        assert one[0][f"{name} resumed"] == one[0][name]
    assert len(set(one[0].values())) == len(one[0]) - 3


class Huge(Net):
    """In step 3 the first layer's gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def loss(self, batch: Any) -> Tensor:
        self.num_steps += 1
        factor = torch.inf if self.num_steps in (5, 6) else 1.0
        return super().loss(batch) + factor * self.net[0].bias.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        bias = self.net[0].bias.grad
        self.is_seen = not bias.isfinite().all()
        bias.nan_to_num_(0, 0, 0)


def test_what_is_not_finite_reaches_all_replicas_and_no_state() -> None:
    trainer = train(ExchangeStrategy(exchange=top_k, replicas=2), Huge, max_steps=3)
    assert trainer.lightning_module.is_seen
    rests = [state["rest"] for state in trainer.strategy._states.values()]
    assert len(rests) == 8 and all(rest.isfinite().all() for rest in rests)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def some_exchange(X: Tensor, state: Any, fraction: float = 0.1) -> Any:
    state["num"] = state.get("num", 0) + 1
    return sum((yield X))


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def new(fraction: float = 0.2, **kwargs: Any) -> ExchangeStrategy:
        options = {"fraction": fraction}
        return ExchangeStrategy(**{"exchange": top_k, "options": options, "replicas": 2, **kwargs})

    trainer = train(new(), Net, max_epochs=1)
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    for strategy, kwargs, said in [
        (new(0.3), {"resume": path}, "--trainer.strategy.options={'fraction': 0.2}, which must"),
        (new(replicas=3), {"resume": path}, "--trainer.strategy.replicas=2, which must stay"),
        (new(exchange=some_exchange), {"resume": path}, "strategy.exchange=lightning_mgpu.exch"),
        (new(), {"resume": tmp_path / "other.ckpt"}, "Only last.ckpt of a run has the exchange's"),
        (new(replicas=1), {"make": Manual}, "need automatic optimization"),
        (new(every=2), {}, "one replica per process"),
        (new(every=2, replicas=1), {"make": Manual}, "need automatic optimization"),
    ]:
        found = attempt(train, strategy, **{"make": Net, **kwargs})
        assert said in found and "\n" not in found, found
    with pytest.raises(ValueError, match="every=0"):
        ExchangeStrategy(every=0)


def by_hand(every: int, num_batches: int, lr: float = 1.0, momentum: float = 0.0) -> Tensor:
    """Two replicas in one process, with torch's own SGD as the outer step."""
    seed_everything(0, verbose=False)
    nets: list[Any] = [Net().double() for _ in range(2)]
    common = [p.detach().clone().requires_grad_() for p in nets[0].parameters()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [net.configure_optimizers() for net in nets]
    outer = torch.optim.SGD(common, lr, momentum, nesterov=momentum > 0)
    trainer = new_trainer(strategy="auto", devices=1)
    loader: Any = batch_loader(samples(60), 10, trainer, shuffle=True, seed=1)
    for i in range(num_batches):
        if i % 6 == 0:
            loader.sampler.set_epoch(i // 6)
            batches = iter(loader)
        X, y = next(batches)
        for net, optimizer, rows in zip(nets, optimizers, (slice(5), slice(5, 10))):
            optimizer.zero_grad()
            net.loss((X[rows], y[rows])).backward()
            optimizer.step()
        if (i + 1) % every == 0 or i + 1 == num_batches:
            for p, *own in zip(common, *(net.parameters() for net in nets)):
                p.grad = p.detach() - torch.stack(own).detach().mean(0)
            outer.step()
            for net in nets:
                for p, q in zip(net.parameters(), common):
                    p.data.copy_(q.data)
    return torch.cat([p.detach().flatten() for p in common])


def flat(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()])


class Scheduled(Net):
    """Another learning rate per replica, or a layer that begins to train."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net[0].bias.requires_grad_(how != "unfreezes")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "rates":
            self.optimizers().param_groups[0]["lr"] = 0.1 * rank()
        elif batch_idx == 2:
            self.net[0].bias.requires_grad_()


class Saves(Callback):
    def __init__(self, directory: Path) -> None:
        self.path = directory / "epoch" / "last.ckpt"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def train_apart(directory: Path) -> dict[str, Any]:
    new = ExchangeStrategy
    found: dict[str, Any] = {}
    found["local_sgd"] = flat(train(new(every=4), Net, num=60))
    found["diloco"] = flat(train(new(every=4, **DILOCO), Net, num=60))
    found["compressed"] = digest(train(new(exchange=top_k, every=4), Random))
    found["whole"] = digest(train(new(every=4, **DILOCO), callbacks=[Saves(directory)]))
    trainer = train(new(every=4, **DILOCO), max_epochs=1)
    for _ in range(2):
        trainer.save_checkpoint(directory / "last.ckpt")
        found.setdefault("saved", []).append((directory / "last.ckpt").read_bytes())
    found["resumed"] = digest(train(new(every=4, **DILOCO), resume=directory / "last.ckpt"))
    for how in ("rates", "unfreezes"):
        found[how] = attempt(train, new(every=4), lambda how=how: Scheduled(how))
    return found


def test_weights_now_and_then(tmp_path: Path) -> None:
    found, other = run_in_processes(2, train_apart, tmp_path)
    assert isinstance(found, dict), found
    # an epoch of six batches ends with an exchange where its checkpoint would be
    assert_close(found["local_sgd"], by_hand(4, 12))
    assert_close(found["diloco"], by_hand(4, 12, 0.7, 0.9))
    assert (found["local_sgd"] - found["diloco"]).abs().max() > 1e-3
    assert found["compressed"] == other["compressed"]
    assert found["resumed"] == other["resumed"] == other["whole"]
    first, second = found["saved"]
    assert first == second, "the second one makes no outer step"
    for how in ("rates", "unfreezes"):
        assert "`every` needs equal learning rates" in found[how] and "\n" not in found[how]
    said = attempt(train, ExchangeStrategy(every=4, **DILOCO), resume=tmp_path / "last.ckpt")
    assert "--trainer.devices=2, which must stay: here it is 1" in said
