"""What steps put into lists, dicts, sets and queues on the module: that of all replicas, in the batch's order."""

from collections import Counter, defaultdict, deque
from typing import Any

import torch


class Collected:
    """Everything a step puts somewhere, in every kind of container."""

    def on_train_epoch_start(self) -> None:
        self.by_name: dict[str, list] = {"X": []}
        self.by_key: Any = defaultdict(list)
        self.by_loader: list[list] = [[], []]
        self.queue: deque = deque()
        self.last: deque = deque(maxlen=10)  # is full after the second step
        self.counts: Counter = Counter()
        self.labels: set[float] = set()
        self.by_sample: dict[float, Any] = {}
        self.same = self.by_name  # under two names
        self.begun: list[Any] = [None]
        self.cleared: list[Any] = [None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        if batch_idx == 0:
            self.begun = []
            self.cleared.clear()
        self.begun.append(X)
        self.cleared.extend(X)
        self.same["X"].append(X)
        self.by_key[batch_idx % 2].append(X)
        self.by_loader[1].append(X)
        self.queue.extend(X)
        self.last.extend(X)
        self.counts.update((y[:, 0] > 0).tolist())
        self.labels |= set(y[:, 0].tolist())
        self.by_sample |= {float(label): x for label, x in zip(y[:, 0], X)}
        return self.loss(batch)  # type: ignore[attr-defined]

    def on_train_epoch_end(self) -> None:
        lists = (self.by_name["X"], *self.by_key.values(), self.by_loader[1], self.begun)
        self.all = [*map(torch.cat, lists), torch.stack(list(self.queue)), torch.stack([*self.by_sample.values()])]
        self.all.append(torch.stack(self.cleared))
        self.all += [torch.tensor(sorted(self.labels)), torch.stack(list(self.last))]
        self.all += [torch.tensor([self.counts[True], self.counts[False]])]


def test_what_steps_collect(Regression, train):
    one, *others = (train(type("Module", (Collected, Regression), {}), k, check=False).all for k in (1, 2, 3))
    assert len(one) == 11
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_last_samples_of_all_replicas(Regression, assert_parity):
    """A full queue loses as many as it gets; every replica reads what all of them have put in."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.last = deque(maxlen=10)

        def training_step(self, batch, batch_idx):
            before = torch.stack([*self.last]).mean() if self.last else 0.0
            self.last.extend(batch[0])
            return self.loss(batch) * (2 + before)

    assert_parity(Module)
