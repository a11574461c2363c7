"""`exchange_gradients` is to be overridden: docs/internals.md clips every replica's gradient."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Manual
from tests.strategies.conftest import Net, assert_close, attempt, fit, samples

NORM = 0.1
PAGE = (Path(__file__).parents[2] / "docs" / "internals.md").read_text()
[CODE] = re.findall(r"```python\n# my_strategy.py\n(.*?)```", PAGE, flags=re.DOTALL)
DEFINED = {"__name__": "my_strategy"}
assert "(1.0 / norm)" in CODE
exec(CODE.replace("(1.0 / norm)", f"({NORM} / norm)"), DEFINED)


def train(window):
    strategy, data = DEFINED["ClipsReplicas"](), DataLoader(samples(), 10)
    return attempt(fit, Net, data, strategy=strategy, accumulate_grad_batches=window)


def by_hand(k, window):
    torch.manual_seed(0)
    net = Net().double()
    optimizer = net.configure_optimizers()
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
            mean = sum(losses) / sum(shares)
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
def test_each_replica_is_clipped(window, in_two_processes):
    for k, results in ((1, [train(window)]), (2, in_two_processes(train, window))):
        for found in results:
            assert not isinstance(found, str), found
            assert_close(found[0], by_hand(k, window))


class SendsOwn(ManualAllreduceStrategy):
    """Sends tensors of its own, which stay as they are."""

    def exchange_gradients(self, gradients, share):
        sent, kept = ({p: g.clone() for p, g in gradients.items()} for _ in range(2))
        super().exchange_gradients(sent, share)
        assert all(torch.equal(sent[p], kept[p]) for p in sent)
        assert not any(torch.equal(g, p.grad) for p, g in sent.items())


def send_own():
    return attempt(fit, Net, DataLoader(samples(), 10), strategy=SendsOwn())


def test_tensors_of_ones_own_are_not_overwritten(in_two_processes):
    for found in in_two_processes(send_own):
        assert_close(found, fit(Net, DataLoader(samples(), 10)))


class SendsMessages(ManualAllreduceStrategy):
    """An override that changes nothing, as a first one does."""

    uses_shared_memory = False

    def sync_bucket(self, bucket, gradients):
        return super().sync_bucket(bucket, gradients)


def send_messages():
    return attempt(fit, Net, DataLoader(samples(), 10), strategy=SendsMessages())


def test_an_override_of_sync_bucket(in_two_processes):
    expected = fit(Net, DataLoader(samples(), 10))
    for found in (send_messages(), *in_two_processes(send_messages)):
        assert_close(found, expected)


def by_product(tensors):
    """Matrix products are in bfloat16 under autocast."""
    total = torch.ones(1, len(tensors), dtype=tensors[0].dtype) @ torch.stack(
        [t.flatten() for t in tensors]
    )
    for t in tensors:
        t.copy_(total.view_as(t))


def fit_by_hand(allreduce):
    X, y = samples().tensors
    strategy = ManualAllreduceStrategy(allreduce)
    data = DataLoader(TensorDataset(X.float(), y), 10)
    return fit(Manual, data, strategy=strategy, precision="bf16-mixed")[0]


def test_autocast_does_not_apply_to_an_allreduce(in_two_processes):
    expected = in_two_processes(fit_by_hand, textbook_allreduce)[0]
    for found in in_two_processes(fit_by_hand, by_product):
        assert_close(found, expected, rtol=1e-5)
