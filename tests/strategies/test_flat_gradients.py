"""`gradient_as_bucket_view`: gradients are views of one buffer a device, and nothing else changes."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn, optim

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy

pytestmark = pytest.mark.slow

calls: list[list[Tensor]] = []


@pytest.fixture(params=["manual_allreduce"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def counted(tensors: list[Tensor]) -> None:
    calls.append(list(tensors))
    textbook_allreduce(tensors)


def flat(bucket_mb: float = 0.0) -> ManualAllreduceStrategy:
    calls.clear()
    return ManualAllreduceStrategy(counted, bucket_mb, gradient_as_bucket_view=True)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_parity(Regression, assert_parity, accumulate, clip):
    def make():
        return Regression(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01))

    assert_parity(make, strategy=flat, accumulate_grad_batches=accumulate, gradient_clip_val=clip)


def test_one_call_a_step_with_everything_in_place(Regression, train):
    class Look(Callback):
        num_steps = 0

        def on_after_backward(self, trainer, module):
            buffer = calls[-1][0]
            ends = {buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes}
            starts = {p.grad.data_ptr() for p in module.parameters()}
            assert buffer.data_ptr() in starts and all(min(ends) <= start < max(ends) for start in starts)
            assert calls[-1][1].data_ptr() not in range(*sorted(ends))
            self.num_steps += 1

    look = Look()
    train(Regression, 2, strategy=flat(), callbacks=lambda: [look])
    training = [call for call in calls if call[0].numel() == sum(p.numel() for p in Regression().parameters())]
    assert len(training) == look.num_steps > 0


def test_slices_of_bucket_mb(Regression, assert_parity):
    assert_parity(Regression, (2,), strategy=lambda: flat(bucket_mb=64 / 2**20))  # 8 float64 of 83
    assert {len(call[0]) for call in calls[-11:]} == {8, 3}


class Branches(nn.Module):
    """A net of which batches use one part or the other, and whose third part is never used, the fourth frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.parts[3].requires_grad_(False)
        self.num_calls = 0

    def forward(self, X: Tensor) -> Tensor:
        self.num_calls += 1
        return self.parts[self.num_calls // 2 % 2](X) + self.parts[3](X)


def test_what_was_not_used_has_no_gradient(Regression, assert_parity):
    """Else a weight decay would shrink it."""

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append([part.weight.grad is None for part in module.net.parts])

    def make():
        return Regression(Branches(), lambda m: optim.AdamW(m.parameters(), 0.01, weight_decay=0.5))

    seen: list[Any] = []
    assert_parity(make, (2,), strategy=flat, callbacks=lambda: [Look()])
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert {tuple(row) for row in seen} == {(False, True, True, True), (True, False, True, True)}


def test_gradients_that_hooks_put_elsewhere(Regression, assert_parity):
    def make():
        module = Regression()
        module.net[0].weight.register_hook(lambda gradient: gradient * 2)
        return module

    assert_parity(make, (2,), strategy=flat)


def test_weights_with_gaps_between_them(Regression, assert_parity):
    """Copies of them have none, and other strides."""

    def make():
        module = Regression()
        module.net[0].weight = nn.Parameter(torch.randn(6, 16, dtype=torch.float64)[:, ::2].t())
        return module

    assert_parity(make, strategy=flat)


def test_two_dtypes_are_refused(Regression, train):
    def make():
        module = Regression()
        module.extra = nn.Parameter(torch.zeros(2, dtype=torch.float32))
        return module

    with pytest.raises(ValueError, match="gradient_as_bucket_view=True needs parameters of one dtype, not"):
        train(make, 2, strategy=flat())


def test_manual_optimization(Regression, assert_parity):
    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_parity(Manual, (2,), strategy=flat)
