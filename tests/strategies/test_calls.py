"""Calls in a step: schedulers step once, collectives gather, calls by only some are reported."""

import warnings

import pytest
import torch
import torchmetrics as tm
from tiny_runs import MANUAL, Manual, Regression, a_loader, assert_close, make_strategy, refused
from torch import optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

EVEN = {"loader": lambda: a_loader(8, 24)}


@pytest.fixture
def warned(recwarn):
    """The warnings so far that hold a text."""
    warnings.simplefilter("always")
    return lambda text: [str(each.message) for each in recwarn if text in str(each.message)]


@pytest.fixture
def lockstep(engine):
    """Makes the strategy under test with lockstep=True."""
    return lambda: make_strategy(engine, lockstep=True)


# Schedulers


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.7),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 11),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12),
}


class Kept(Regression):
    """Keeps its scheduler in an attribute, of which Lightning knows nothing."""

    make = None

    def configure_optimizers(self):
        self.scheduler = type(self).make(optimizer := optim.SGD(self.parameters(), 0.1))
        return optimizer

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.scheduler.step()
        return loss


class Returned(Kept):
    def configure_optimizers(self):
        return [super().configure_optimizers()], [self.scheduler]

    def training_step(self, batch, batch_idx):
        self.lr_schedulers().step()
        return self.loss(batch)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("base", [Kept, Returned])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_locked", [False, True])
def test_a_scheduler_that_a_step_steps(assert_parity, lockstep, name, base, is_locked):
    make = type("Module", (base,), {"make": staticmethod(SCHEDULERS[name])})
    strategy = lockstep if is_locked else lambda: None
    one, *others = assert_parity(make, (2, 3), strategy=strategy, check=False)
    rates = [each.trainer.optimizers[0].param_groups[0]["lr"] for each in (one, *others)]
    assert_close(rates[1:], [rates[0]] * 2)


# Collectives


def contrastive(self, batch):
    """Every sample is compared with all of the batch."""
    Z = self.all_gather(self.net(batch[0]), sync_grads=True).view(-1, 3)
    return (Z @ Z.T).logsumexp(1).mean()


def clip_loss(self, batch):
    """Rows of the shard against columns of the batch, as CLIP has it."""
    Z, n = self.net(batch[0]), len(batch[0])
    columns = self.all_gather(Z + 0.1 * batch[1], sync_grads=True).view(-1, 3)
    targets = torch.arange(n, device=Z.device) + self.global_rank * n
    return F.cross_entropy(Z @ columns.T, targets)


def gathered_by_name(self, batch):
    """A dict of tensors, of which one has no gradient."""
    own = {"Z": self.net(batch[0]), "y": batch[1]}
    every = self.all_gather(own, sync_grads=True)
    return (every["Z"].view(-1, 3) @ every["y"].view(-1, 3).T).logsumexp(1).mean()


LOSSES = [contrastive, clip_loss, gathered_by_name]


def slow(module):
    return optim.SGD(module.parameters(), 0.02)


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_gathered_samples(assert_parity, lockstep, loss, base):
    make = type("Module", (base,), {"loss": loss})
    kwargs = {"strategy": lockstep, "val": True, "check": False, **EVEN}
    assert_parity(lambda: make(optimizer=slow), (2, 4), **kwargs)


def test_gathered_while_gradients_accumulate(assert_parity, lockstep):
    make = type("Module", (Regression,), {"loss": contrastive})
    kwargs = {"strategy": lockstep, "accumulate_grad_batches": 2, "check": False, **EVEN}
    assert_parity(lambda: make(optimizer=slow), (2,), **kwargs)


@pytest.fixture
def seen_in_a_step(train, lockstep):
    """What `look(module, X)` gives in a step of every replica, and in a hook after the step."""

    def see(k, look):
        inside, outside = [], []

        class Module(Regression):
            def training_step(self, batch, batch_idx):
                inside.append((batch[0], look(self, batch[0])))
                return self.loss(batch)

            def on_train_batch_end(self, outputs, batch, batch_idx):
                outside.append((batch[0], look(self, batch[0])))

        train(Module, k, lockstep(), check=False, max_epochs=1, loader=lambda: a_loader(8, 8))
        return inside, outside

    return see


@pytest.mark.parametrize("k", [2, 4])
def test_what_all_gather_returns(seen_in_a_step, k):
    look = lambda module, X: module.all_gather(X)  # noqa: E731
    inside, [(whole, outside)] = seen_in_a_step(k, look)
    for _, every in inside:
        assert every.shape == (k, 8 // k, 6)
        assert_close(every.view(8, 6), whole, 0, 0)
    assert torch.equal(outside, whole)


def test_gradients_go_through_where_they_are_asked_for(seen_in_a_step):
    def look(module, X):
        Z = module.net(X)
        with_graph = module.all_gather(Z, sync_grads=True)
        return with_graph.requires_grad, module.all_gather(Z).requires_grad

    inside, _ = seen_in_a_step(2, look)
    assert [found for _, found in inside] == [(True, False)] * 2


@pytest.mark.parametrize("inference_mode", [False, True])
def test_gradients_in_a_validation_do_not_get_lost(train, lockstep, inference_mode):
    class Module(Regression):
        def validation_step(self, batch, batch_idx):
            with torch.inference_mode(False), torch.enable_grad():
                X = batch[0].clone().requires_grad_()
                every = self.all_gather(self.net(X), sync_grads=True)
                torch.autograd.grad(every.sum() + X.sum(), X)

    with refused("gradients of what replicas have exchanged"):
        train(Module, 2, lockstep(), val=True, inference_mode=inference_mode)


def test_a_replica_has_a_rank_in_such_a_step(seen_in_a_step):
    look = lambda module, X: (module.global_rank, module.trainer.world_size)  # noqa: E731
    inside, outside = seen_in_a_step(4, look)
    assert sorted(found for _, found in inside) == [(n, 4) for n in range(4)]
    assert [found for _, found in outside] == [(0, 1)]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_reduce(seen_in_a_step, op):
    look = lambda module, X: module.trainer.strategy.reduce(X.mean(0), reduce_op=op)  # noqa: E731
    inside, [(whole, outside)] = seen_in_a_step(2, look)
    for _, found in inside:
        assert_close(found, whole.mean(0) * (1 if op == "mean" else 2))
    assert_close(outside, whole.mean(0))


def test_broadcast(seen_in_a_step):
    def look(module, X):
        strategy, rank = module.trainer.strategy, module.global_rank
        return strategy.broadcast({"rank": rank, "X": X}, src=1), strategy.broadcast(rank)

    inside, [(whole, (outside, _))] = seen_in_a_step(2, look)
    for _, (second, first) in inside:
        assert second["rank"] == 1 and first == 0
        assert_close(second["X"], whole[4:], 0, 0)
    assert torch.equal(outside["X"], whole)


def test_every_replica_has_a_copy_of_what_is_broadcast(seen_in_a_step):
    """Without a graph, as from another process."""

    def look(module, X):
        given = {"ones": torch.ones(2), "Z": module.net(X)}
        found = module.trainer.strategy.broadcast(given)
        found["ones"] += 1
        given["ones"] += 5  # in the first replica, before the others go on
        return found["ones"].tolist(), found["Z"].requires_grad

    inside, _ = seen_in_a_step(4, look)
    assert [found for _, found in inside] == [([2.0, 2.0], False)] * 4


def test_every_replica_has_a_copy_of_what_a_metric_computes(train, lockstep):
    found = []

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.metric = tm.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.metric.update(batch[0])
            value = self.metric.compute()
            value += 1
            found.append(float(value))
            return self.loss(batch)

    train(Module, 2, lockstep(), check=False, max_epochs=1, limit_train_batches=1)
    assert found[0] == found[1]


COLLECTIVES = {
    "all_gather": lambda module, X: module.all_gather(X),
    "reduce": lambda module, X: module.trainer.strategy.reduce(X, reduce_op="sum"),
    "broadcast": lambda module, X: module.trainer.strategy.broadcast(X, src=1),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_collectives_need_lockstep(train, name, step):
    def training_step(self, batch, batch_idx):
        COLLECTIVES[name](self, batch[0])
        return self.loss(batch)

    with refused("lockstep=True"):
        train(type("Module", (Regression,), {step: training_step}), 2, val=True, check=False)


def test_unequal_shards_cannot_be_stacked(train, lockstep):
    make = type("Module", (Regression,), {"loss": contrastive})
    with pytest.raises((RuntimeError, ValueError), match=r"[Ss]hards") as error:
        train(make, 2, lockstep(), loader=lambda: a_loader(7, 14), check=False)
    assert "\n" not in str(error.value)


def test_a_value_logged_with_sync_dist_needs_no_lockstep(assert_parity):
    """Lightning reduces it when the step is over."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

    assert_parity(Module, (2,), check=False)


# What only some replicas call


def gives_a_metric(self, X, loss):
    if len(X) > 2:
        self.metric.update(loss)


def logs_a_value(self, X, loss):
    if len(X) > 2:
        self.log("of_large_shards", loss, on_step=False, on_epoch=True)


def always(self, X, loss):
    self.metric.update(loss)
    self.log("of_large_shards", loss, on_step=False, on_epoch=True)


class Sometimes(Regression):
    """Two replicas have shards of three samples and of two."""

    gives = staticmethod(always)

    def __init__(self):
        super().__init__()
        self.metric = tm.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.gives(self, batch[0], loss.detach())
        return loss if self.gives is not returns_none or len(batch[0]) > 2 else None

    def validation_step(self, batch, batch_idx):
        self.gives(self, batch[0], self.loss(batch))


def returns_none(self, X, loss):
    """Instead of a loss."""


PARTS = {"metric": gives_a_metric, "of_large_shards": logs_a_value, "loss": returns_none}


@pytest.mark.parametrize("name", PARTS)
def test_what_only_some_replicas_give_is_said_once(train, warned, name):
    make = type("Module", (Sometimes,), {"gives": staticmethod(PARTS[name])})
    train(make, 2, loader=lambda: a_loader(5, 15), check=False)
    assert len(warned(name)) == 1


@pytest.mark.parametrize("num_samples", [15, 16])
def test_nothing_is_said_where_all_replicas_that_have_samples_give_it(train, warned, num_samples):
    """A last batch of a single sample keeps one replica idle."""
    train(Sometimes, 2, loader=lambda: a_loader(5, num_samples), check=False, val=True)
    assert not [text for name in PARTS for text in warned(name) if "replica" in text]


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_what_only_some_replicas_log_in_validation_is_said_once(train, warned):
    make = type("Module", (Sometimes,), {"gives": staticmethod(logs_a_value)})
    make.training_step = Regression.training_step
    train(make, 2, loader=lambda: a_loader(5, 15), check=False, val=True)
    assert len(warned("of_large_shards")) == 1
