"""Attributes that steps use on the CPU, with numpy say: they stay there, wherever the replicas are."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Slots:
    edges: torch.Tensor


KINDS = {
    "tensor": (lambda edges: edges, lambda held: held),
    "dict": (lambda edges: {"edges": edges}, lambda held: held["edges"]),
    "list in a tuple": (lambda edges: ([edges],), lambda held: held[0][0]),
    "object": (lambda edges: SimpleNamespace(edges=edges), lambda held: held.edges),
    "slots": (Slots, lambda held: held.edges),
    "closure": (lambda edges: lambda: edges, lambda held: held()),
    "long list": (lambda edges: [edges] * 101, lambda held: held[100]),
}


@pytest.mark.parametrize("hook", ["__init__", "on_train_batch_start"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_used_on_the_cpu_stays_there(Regression, assert_parity, kind, hook):
    put, get = KINDS[kind]

    def set_edges(self, *_):
        if hook == "__init__":
            Regression.__init__(self)
        self.held = put(torch.linspace(-1, 1, 5, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        X, y = batch
        edges = get(self.held)
        bins = torch.searchsorted(edges, y.cpu().contiguous())
        assert len(edges.numpy()) == 5
        return self.loss(batch) + 0.1 * (self.net(X) * bins.to(X.device)).mean()

    one, two = assert_parity(type("Module", (Regression,), {hook: set_edges, "training_step": training_step}), (2,))
    assert get(two.held).is_cpu
    torch.testing.assert_close(get(two.held), get(one.held))


@pytest.mark.parametrize("container", ["attribute", "dict"])
def test_histograms_that_hooks_edit(Regression, assert_parity, container):
    """On the CPU, in place, between steps that read them."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            counts = torch.ones(4, dtype=torch.float64)
            self.counts = counts if container == "attribute" else {"counts": counts}

        def counts_now(self):
            return self.counts if container == "attribute" else self.counts["counts"]

        def on_train_batch_start(self, batch, batch_idx):
            self.counts_now().add_(torch.histc(batch[1].cpu(), 4, -1, 1))

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * float(self.counts_now().numpy()[0]) / 10

    one, *others = assert_parity(Module)
    for other in others:
        torch.testing.assert_close(other.counts_now(), one.counts_now())
