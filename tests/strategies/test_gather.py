"""How results of shards become one: tensors are joined, and no length is taken for a meaning."""

import warnings

import pytest
import torch
import torchmetrics as tm
from tiny_runs import MANUAL, Regression, a_loader, assert_close
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)  # what both share


@pytest.fixture
def warned(recwarn):
    """The warnings so far that hold a text."""
    warnings.simplefilter("always")
    return lambda text: [str(each.message) for each in recwarn if text in str(each.message)]


@pytest.fixture
def predicted(trainer_on):
    """The predictions of every batch by a `predict_step` that returns `of(X)`."""

    def predicted(of, X, batch_size, k=2):
        class Returns(Regression):
            def predict_step(self, batch, batch_idx):
                return of(batch[0])

        return trainer_on(k).predict(Returns(), DataLoader(TensorDataset(X), batch_size))

    return predicted


# What steps return


FOUND = {  # two and two; then three and one; then all; then none and one
    "floats": lambda X: X[X[:, 0] > 0.2, 0],
    "rows": lambda X: X[X[:, 0] > 0.2],
    "integers": lambda X: (X[X[:, 0] > 0.2, 0] * 10).long(),
    "booleans": lambda X: X[X[:, 0] > 0.2, 0] > 0.5,
    "in a dict": lambda X: {"found": X[X[:, 0] > 0.2, 0]},
    "complex": lambda X: X[X[:, 0] > 0.2, 0] * 1j,
}
COLUMN = [0.9, 0.1, 0.8, 0.3, 0.5, 0.0, *(0.6, 0.7, 0.3, 0.1, 0.9, 0.2)]
COLUMN += [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, *(0.1, 0.0, 0.1, 0.2, 0.9, 0.1)]


@pytest.mark.parametrize("what", FOUND)
def test_what_a_step_finds(predicted, what):
    """Also where all shards find equally many."""
    X = torch.stack([torch.tensor(COLUMN), torch.arange(24) / 10], 1).double()
    assert_close(predicted(FOUND[what], X, 6), predicted(FOUND[what], X, 6, k=1))


def matrix(X):
    return {"matrix": X[:, :3].T @ X[:, :3]}


@pytest.mark.parametrize("k", [2, 4])
def test_a_matrix_of_each_shard_is_joined_and_warned_of(predicted, warned, k):
    """Whether it happens to be as long as a shard, or not."""
    X = torch.randn(24, 5).double()
    by_shard = [matrix(shard)["matrix"] for shard in X.split(8 // k)]
    batches = predicted(matrix, X, 8, k)
    expected = [torch.cat(by_shard[n : n + k]) for n in range(0, len(by_shard), k)]
    assert_close([each["matrix"] for each in batches], expected)
    assert len(warned("matrix")) == 1


def test_a_matrix_as_long_as_a_shard(predicted):
    X = torch.randn(6, 5).double()
    [found] = predicted(matrix, X, 6)
    assert_close(found["matrix"], torch.cat([matrix(X[:3])["matrix"], matrix(X[3:])["matrix"]]))


def test_counts_of_classes_are_joined_and_warned_of(predicted, warned):
    """Integers, too, in a tuple."""
    X = torch.arange(16)[:, None] % 5
    count = lambda X: (X, {"count_of_class": X[:, 0].bincount(minlength=5)})  # noqa: E731
    found = [each[1]["count_of_class"] for each in predicted(count, X, 8)]
    shards = [X[n : n + 4, 0].bincount(minlength=5) for n in range(0, 16, 4)]
    assert_close(found, [torch.cat(shards[:2]), torch.cat(shards[2:])])
    assert len(warned("count_of_class")) == 1


def test_found_rows_of_different_lengths_are_joined_in_silence(predicted, warned):
    X = torch.tensor([0.9, 0.8, 0.3, 0.1, 0.1, 0.1, 0.1, 0.5])[:, None]
    [found] = predicted(lambda X: {"found": X[X[:, 0] > 0.2]}, X, 8)
    assert_close(found["found"], X[X[:, 0] > 0.2])
    assert not warned("found")


ONES = {  # of a shard, and of the whole batch of shards of four samples and of three
    "means": (lambda X: X.mean(), lambda X: X.mean()),
    "numbers": (lambda X: float(X.mean()), lambda X: float(X.mean())),
    "counts": (lambda X: torch.tensor(len(X)), lambda X: torch.tensor(7)),
    "integers": (lambda X: len(X), lambda X: 7),
    "layers first": (lambda X: X[None].repeat(2, 1, 1), lambda X: X[None].repeat(2, 1, 1)),
    "tokens": (lambda X: X.reshape(-1), lambda X: X.reshape(-1)),
}


@pytest.mark.parametrize("what", ONES)
def test_what_is_averaged_added_and_joined_elsewhere(predicted, warned, what):
    X = torch.randn(7, 5).double()
    of_shard, of_batch = ONES[what]
    [found] = predicted(lambda X: {"of_all": of_shard(X)}, X, 7)
    assert_close(found["of_all"], of_batch(X))
    assert not warned("of_all")


def test_tensors_whose_other_dimensions_differ(predicted, warned):
    """Padded to the longest in the shard: the list of what the replicas returned."""
    X = torch.arange(42).view(7, 6)
    found = predicted(lambda X: {"padded": X[:, : len(X)]}, X.repeat(2, 1), 7)
    assert_close([each["padded"] for each in found], [[X[:4, :4], X[4:, :3]]] * 2)
    assert len(warned("padded")) == 1


# What metrics are given


class Summed(tm.Metric):
    """The mean of what `add` makes of its arguments, a sum and a count; it counts its updates."""

    def __init__(self, add, num_classes=1):
        super().__init__()
        self.add = add
        self.add_state("total", torch.zeros(num_classes).double(), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("num_updates", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, *args):
        total, count = self.add(*args)
        self.total += total
        self.count += count
        self.num_updates += 1

    def compute(self):
        return self.total / self.count


def of_distribution(normal, y):
    assert isinstance(normal, torch.distributions.Normal)
    return -normal.log_prob(y).sum(), y.numel()


def of_weights(preds, target, weights):
    assert len(weights) == 5 and len(preds) == len(target)
    return ((preds - target).square() * weights).sum(), len(preds)


def of_both(preds, sums):
    return preds.sum() + sums, len(preds)


def weighted(X):
    return X, X.flip(1), torch.arange(5, device=X.device).double()


def normal(X):
    return torch.distributions.Normal(X[:, 0], 1.0), X[:, 1]


GIVEN = {  # a metric, what a step gives to it of X (N, 5), and how many updates of two shards
    "sums of classes": (lambda: Summed(lambda sums: (sums, 1), 5), lambda X: (X.sum(0),), 2),
    "an object": (lambda: Summed(of_distribution), normal, 2),
    "weights of classes": (lambda: Summed(of_weights), weighted, 2),
    "sums and predictions": (lambda: Summed(of_both, 5), lambda X: (X[:, :1], X.sum(0)), 2),
    "samples": (lambda: Summed(lambda X: (X.sum(), len(X))), lambda X: (X,), 1),
    "tokens": (lambda: Summed(lambda X: (X.sum(), len(X))), lambda X: (X.repeat(3, 1),), 1),
}


@pytest.fixture
def metric_on(train):
    """The metric after training on k devices; a step gives to it what `give` makes of X."""

    def metric_on(k, make, give, is_forward):
        class Module(Regression):
            def __init__(self):
                super().__init__()
                self.metric = make()

            def training_step(self, batch, batch_idx):
                (self.metric if is_forward else self.metric.update)(*give(batch[0][:, :5]))
                return self.loss(batch)

        return train(Module, k, loader=lambda: a_loader(7, 21), check=False, max_epochs=1).metric

    return metric_on


@pytest.mark.parametrize("is_forward", [False, True])
@pytest.mark.parametrize("what", GIVEN)
def test_what_a_metric_is_given(metric_on, what, is_forward):
    """Joined where every argument is as long as its shard, or a multiple; else by shards."""
    make, give, num_updates = GIVEN[what]
    one, two = (metric_on(k, make, give, is_forward) for k in (1, 2))
    assert_close(two.total, one.total)
    if what != "sums of classes":  # their number of samples is unknown
        assert_close(two.compute(), one.compute())
    if not is_forward:
        assert (one.num_updates, two.num_updates) == (3, 3 * num_updates)


@pytest.mark.parametrize("is_forward", [False, True])
def test_a_mean_of_vectors_counts_samples(metric_on, is_forward):
    """Means of classes in a shard, of four samples or of three."""
    give = lambda X: (X.mean(0),)  # noqa: E731
    one, two = (metric_on(k, tm.MeanMetric, give, is_forward).compute() for k in (1, 2))
    assert_close(two, one, 1e-6)
