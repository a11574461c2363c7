"""An optimizer's update compiled: the same weights, whatever a scheduler does, and nobody notices but the clock."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from timm.optim import Muon
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mgpu import compiled_step
from lightning_mgpu.callbacks import FastModel
from lightning_mgpu.compiled_step import MOST_COMPILATIONS, compile_step, is_compiled, plan_of
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet

OPTIMIZERS = {
    "SGD": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": Adam,
    "Adam(foreach=False)": partial(Adam, foreach=False),
    "AdamW(amsgrad=True)": partial(AdamW, amsgrad=True),
    "Muon": partial(Muon, ns_steps=3, nesterov=True),
}
DEVICES = {"auto": 1, "dp": 2, "manual_allreduce": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_update_is_the_update(
    name: str, compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    plain = make_net()
    fast = copy.deepcopy(plain)
    rates = []
    for net in (plain, fast):
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if net is fast:
            compile_step(optimizer)
        losses = steps(net, optimizer, scheduler, 12)
        assert all(isinstance(loss, Tensor) and loss.requires_grad for loss in losses)
        assert type(optimizer.param_groups[0]["lr"]) is float  # for schedulers, loggers and checkpoints
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] == pytest.approx(0.1 / 13)
    for a, b in zip(plain.parameters(), fast.parameters()):
        # Muon multiplies in bfloat16
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-2 if name == "Muon" else 1e-5)
    assert 1 <= compiler.frame_count <= 3  # not one for each of twelve rates


def test_kernels_are_the_update(make_net: Callable, steps: Callable) -> None:
    plain = make_net()
    fast = copy.deepcopy(plain)
    for net in (plain, fast):
        optimizer = Adam(net.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if net is fast:
            compile_step(optimizer)
        steps(net, optimizer, scheduler, 4)
    for a, b in zip(plain.parameters(), fast.parameters()):
        torch.testing.assert_close(b, a)
    torch._dynamo.reset()


def test_hooks_and_schedulers_are_told(
    compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    net, calls = make_net(), []
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    compile_step(optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns of steps that it did not see
        steps(net, optimizer, scheduler, 2)
        steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 2)  # one made afterwards
    assert calls == ["before", "after"] * 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_go_on_elsewhere(
    name: str, compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    """In a checkpoint is what the optimizer keeps without the compiler: either goes on with the other's."""
    nets = [make_net() for _ in range(3)]
    for i, net in enumerate(nets):
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.1)
        if i != 1:
            compile_step(optimizer)
        steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 3)
        other = OPTIMIZERS[name](net.parameters(), lr=0.3)
        if i != 0:
            compile_step(other)  # before the state is there, as a run that is resumed does
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(net, other, LambdaLR(other, lambda step: 1.0), 3, seed=1)
        assert other.param_groups[0]["lr"] == 0.1
    for parameters in zip(*(net.parameters() for net in nets)):
        for parameter in parameters[1:]:
            torch.testing.assert_close(parameter, parameters[0], rtol=1e-4, atol=1e-2 if name == "Muon" else 1e-5)


def test_double_precision_has_a_rate_in_double_precision(compiler: CompileCounterWithBackend) -> None:
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(0.0)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer = SGD(net.parameters(), lr=0.1)
    compile_step(optimizer)
    optimizer.step()
    assert net.weight.item() == -0.1


def halve(group: dict[str, Any]) -> None:
    group["lr"] = group["lr"] / 2


def halve_in_place(group: dict[str, Any]) -> None:
    group["lr"] *= 0.5


def halve_and_keep(group: dict[str, Any]) -> None:
    group["last_lr"] = group["lr"]
    group["lr"] = group["lr"] / 2


@pytest.mark.parametrize("change", [halve, halve_in_place, halve_and_keep])
def test_an_update_may_set_its_own_rate(
    change: Callable, compiler: CompileCounterWithBackend, make_net: Callable
) -> None:
    class Halving(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                change(group)

    optimizer = Halving(make_net().parameters(), lr=1.0)
    compile_step(optimizer)
    optimizer.step()
    optimizer.step()
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.25 and type(group["lr"]) is float
    assert change is not halve_and_keep or (group["last_lr"] == 0.5 and type(group["last_lr"]) is float)


@pytest.mark.parametrize("strategy", DEVICES)
def test_it_trains_the_same_under_every_strategy(
    strategy: str, make_trainer: Callable, root: Path, compiler: CompileCounterWithBackend
) -> None:
    class Copies(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            own = getattr(trainer.strategy, "_own", None)
            found.extend(is_compiled(optimizer) for optimizer in trainer.optimizers)
            found.extend(is_compiled(copies[0]) and own.repeats[0] for copies in (own.copies if own else ()))

    def train(fast: bool, **options: Any) -> LeNet:
        torch.manual_seed(0)
        model = LeNet(partial(SGD, lr=0.1, momentum=0.9), partial(OneCycleLR, max_lr=0.1, cycle_momentum=False))
        images = FashionMNIST(root=str(root), batch_size=64, val_size=101)
        trainer = make_trainer(
            max_steps=8, callbacks=[FastModel(compile_optimizer=fast), *([Copies()] * fast)], **options
        )
        trainer.fit(model, images)
        return model

    found: list[bool] = []
    fast = train(True, strategy=strategy, devices=DEVICES[strategy])
    assert found == [True] * (2 if strategy == "manual_allreduce" else 1)  # every replica makes the compiled update
    for a, b in zip(train(False).parameters(), fast.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert compiler.frame_count >= 1


def test_replicas_stay_equal_when_it_is_given_up(
    make_trainer: Callable, root: Path, compiler: CompileCounterWithBackend
) -> None:
    class Equal(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            first, second = trainer.strategy.replicas()
            found.append(all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters())))
            (copied,), (original,) = trainer.strategy._own.copies[0], trainer.optimizers
            assert plan_of(copied) is plan_of(original)
            assert trainer.strategy._own.repeats == [True]  # neither was given the other's result
            on.append(plan_of(original).is_on)

    torch.manual_seed(0)
    found: list[bool] = []
    on: list[bool] = []
    model = LeNet(partial(Adam, lr=0.01), partial(OneCycleLR, max_lr=0.01))  # cycles betas, too
    callbacks = [FastModel(compile_optimizer=True), Equal()]
    trainer = make_trainer(max_steps=12, callbacks=callbacks, strategy="manual_allreduce", devices=2)
    with pytest.warns(UserWarning, match="goes on without being compiled"):
        trainer.fit(model, FashionMNIST(root=str(root), batch_size=32, val_size=101))
    assert found == [True] * 12
    assert on == [False] + [True] * MOST_COMPILATIONS + [False] * (11 - MOST_COMPILATIONS)


def test_replicas_are_compared_when_something_was_compiled(
    make_trainer: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Callable] = []

    def compiles(update: Callable) -> Callable:
        is_copy, ran = bool(compiled), []

        def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            update(optimizer, *args, **kwargs)
            counters["stats"]["unique_graphs"] += not ran
            ran.append(True)
            if is_copy:  # its kernels round differently
                optimizer.param_groups[0]["params"][0].data.add_(1e-6)

        compiled.append(run)
        return run

    class Equal(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            first, second = trainer.strategy.replicas()
            found.append(all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters())))
            repeats.append(trainer.strategy._own.repeats[0])

    found: list[bool] = []
    repeats: list[bool | None] = []
    monkeypatch.setattr(compiled_step.torch, "compile", compiles)
    callbacks = [FastModel(compile_optimizer=True), Equal()]
    trainer = make_trainer(max_steps=3, callbacks=callbacks, strategy="manual_allreduce", devices=2)
    trainer.fit(LeNet(partial(SGD, lr=0.1)), FashionMNIST(root=str(root), batch_size=64, val_size=101))
    assert found == [True] * 3
    assert repeats == [True, False, False]  # the first step is not compiled, of the second the copy gets the result


def test_step_counters_follow_their_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, device="meta")}
    compiled_step._move_counters(optimizer)
    assert optimizer.state[parameter]["step"].device.type == "meta"


def test_settings_that_keep_changing_are_not_compiled_for_ever(
    compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    plain = make_net()
    fast = copy.deepcopy(plain)
    for net in (plain, fast):
        optimizer = Adam(net.parameters(), lr=0.1)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=20)  # cycles betas, too
        if net is fast:
            compile_step(optimizer)
            with pytest.warns(UserWarning, match=f"Adam was compiled {MOST_COMPILATIONS} times.*cycle_momentum: false"):
                steps(net, optimizer, scheduler, 15)
        else:
            steps(net, optimizer, scheduler, 15)
    assert compiler.frame_count <= MOST_COMPILATIONS + 1  # of 14
    for a, b in zip(plain.parameters(), fast.parameters()):
        torch.testing.assert_close(b, a)


def test_settings_may_change_now_and_then(
    compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    compile_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decay in (0.0, 0.1, 0.0, 0.1, 0.0, 0.1):
            optimizer.param_groups[0]["weight_decay"] = decay
            steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 1)
    assert plan_of(optimizer).is_on
