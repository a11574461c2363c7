"""`exchange_gradients` is to be overridden: docs/strategies.md clips every replica's gradient."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import Net, assert_close, attempt, fit, samples

NORM = 0.1
PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
[CODE] = re.findall(r"```python\n# my_strategy.py\n(.*?)```", PAGE, flags=re.DOTALL)
DEFINED: dict[str, Any] = {"__name__": "my_strategy"}
assert "(1.0 / norm)" in CODE
exec(CODE.replace("(1.0 / norm)", f"({NORM} / norm)"), DEFINED)


def train(window: int) -> Any:
    strategy, data = DEFINED["ClipsReplicas"](), DataLoader(samples(), 10)
    return attempt(fit, Net, data, strategy=strategy, accumulate_grad_batches=window)


def by_hand(k: int, window: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    optimizer: Any = net.configure_optimizers()
    batches = [*DataLoader(samples(), 10)] * 2
    for i in range(0, len(batches), window):
        several = batches[i : i + window]
        total = torch.zeros_like(parameters_to_vector(net.parameters()))
        for replica in range(k):
            losses, shares = [], []
            for X, y in several:
                shard = X.tensor_split(k)[replica], y.tensor_split(k)[replica]
                shares.append(len(shard[1]) / len(y))
                losses.append(net.loss(shard) * shares[-1])
            mean: Any = sum(losses) / sum(shares)
            gradient = parameters_to_vector(torch.autograd.grad(mean, [*net.parameters()]))
            clipped = gradient * (NORM / gradient.norm()).clamp(max=1)
            assert gradient.norm() > NORM
            total += clipped * sum(shares) / window
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        vector_to_parameters(total, [p.grad for p in net.parameters()])
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("window", [1, 3])
def test_each_replica_is_clipped(window: int, in_two_processes: Callable) -> None:
    for k, results in ((1, [train(window)]), (2, in_two_processes(train, window))):
        for found in results:
            assert not isinstance(found, str), found
            assert_close(found[0], by_hand(k, window))


class SendsOwn(ManualAllreduceStrategy):
    """Sends tensors of its own, which stay as they are."""

    def exchange_gradients(self, gradients: Any, share: float) -> None:
        sent, kept = ({p: g.clone() for p, g in gradients.items()} for _ in range(2))
        super().exchange_gradients(sent, share)
        assert all(torch.equal(sent[p], kept[p]) for p in sent)
        assert not any(torch.equal(g, p.grad) for p, g in sent.items())


def send_own():
    return attempt(fit, Net, DataLoader(samples(), 10), strategy=SendsOwn())


def test_tensors_of_ones_own_are_not_overwritten(in_two_processes):
    for found in in_two_processes(send_own):
        assert_close(found, fit(Net, DataLoader(samples(), 10)))
