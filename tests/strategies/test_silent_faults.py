"""Code of users that was wrong in silence once: it is equal to one device now, or warned of."""

import warnings
from collections import defaultdict, deque

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningDataModule
from tiny_runs import HOME, MANUAL, Manual, Regression, a_loader, assert_close, batch_norm_net
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.strategies.manual_allreduce import ManualAllreduceStrategy

pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)


@pytest.fixture
def warned(recwarn):
    """The warnings so far that hold a text."""
    warnings.simplefilter("always")
    return lambda text: [str(each.message) for each in recwarn if text in str(each.message)]


def in_place(module, batch):
    module.state.mul_(0.9).add_(1)
    return module.state.item()


def in_hparams(module, batch):
    module.hparams.n += 1
    return module.hparams.n


@pytest.mark.parametrize("edit", [in_place, in_hparams])
def test_a_count_of_steps(assert_parity, edit):
    """Each replica counts in its own tensor, or dict of a class of its own."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"n": 0})
            self.state = torch.zeros((), dtype=torch.float64)

        def loss(self, batch):
            return super().loss(batch) * (1 + edit(self, batch))

    assert_parity(Module)


def test_lists_of_a_defaultdict_in_validation(train):
    class Module(Regression):
        def on_validation_epoch_start(self):
            self.found = defaultdict(list)

        def validation_step(self, batch, batch_idx):
            self.found["y"].append(batch[1])

        def on_validation_epoch_end(self):
            self.whole = torch.cat(self.found["y"])

    one, two = (train(Module, k, max_epochs=1, val=True, check=False).whole for k in (1, 3))
    assert_close(two, one)


def assigned_buffer(module, X):
    module.scale = 0.9 * module.scale + 0.1 * X.mean()


def sum_by_class(module, X):
    module.sums = module.sums + X.abs().sum(0)


def longer_tensor(module, X):
    module.kept = torch.cat([module.kept, X])


def number_of_samples(module, X):
    module.seen = module.seen + len(X)


def budget(module, X):
    module.left -= len(X)


def rate(module, X):
    module.optimizers().param_groups[0]["lr"] = 0.01 / (1 + X.abs().mean().item())


EDITS = {
    assigned_buffer: "scale of Module",
    sum_by_class: "sums of Module",
    longer_tensor: "kept of Module",
    number_of_samples: "seen of Module",
    budget: "left of Module",
    rate: "lr of an optimizer",
}


@pytest.mark.parametrize("edit", EDITS)
def test_results_of_a_shard_are_warned_of_by_name(train, warned, edit):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))
            self.sums = torch.zeros(6, device=HOME).double()
            self.kept = torch.zeros(0, 6, device=HOME).double()
            self.seen, self.left = torch.zeros(()), 1000

        def training_step(self, batch, batch_idx):
            edit(self, batch[0])
            return self.loss(batch)

    train(Module, 2, loader=lambda: a_loader(8, 32), check=False)
    assert len(warned(EDITS[edit])) == 1


COLLECTED = {
    "a longer list": (list, lambda q, items: q + items),
    "flags in a deque": (lambda: deque(maxlen=6), lambda q, items: q.extend(items) or q),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_what_is_collected_is_that_of_one_device(train, name):
    make, add = COLLECTED[name]

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.state = make()
            self.state.extend([True])

        def training_step(self, batch, batch_idx):
            self.state = add(self.state, (batch[0][:, 0] > 0).tolist())
            return self.loss(batch)

    one, two, three = (train(Module, k, check=False).state for k in (1, 2, 3))
    assert one == two == three


def test_a_teacher_in_a_list(assert_parity):
    """It is not a submodule, but it follows the weights in every step."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.teacher = [nn.Linear(6, 3, device=HOME).double().requires_grad_(False)]

        def loss(self, batch):
            X, y = batch
            with torch.no_grad():
                self.teacher[0].weight.data.mul_(0.9).add_(0.01)
            return F.mse_loss(self.net(X), y + self.teacher[0](X))

    assert_parity(Module)


@pytest.mark.parametrize("detach", ["assigned", "in place", "in a tuple"])
def test_a_hook_cuts_the_graph_of_a_hidden_state(assert_parity, detach):
    """Truncated backpropagation through time goes on with each replica's own state."""

    class Module(Regression):
        state = None

        def loss(self, batch):
            X, y = batch
            Z = self.net(X)
            if self.state is not None and batch[0].shape[0] == self.first().shape[0]:
                Z = Z + 0.5 * self.first()
            self.state = (Z,) if detach == "in a tuple" else Z
            return F.mse_loss(Z, y)

        def first(self):
            return self.state[0] if isinstance(self.state, tuple) else self.state

        def on_train_batch_end(self, *_):
            if detach == "in place":
                self.state.detach_()
            elif detach == "assigned":
                self.state = self.state.detach()
            else:
                self.state = tuple(part.detach() for part in self.state)

    assert_parity(Module, loader=lambda: a_loader(8, 32))


def test_states_set_by_index(assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.states = [None, None]

        def loss(self, batch):
            X, y = batch
            Z = self.net(X)
            for n, state in enumerate(self.states):
                Z = Z if state is None else Z + 0.1 * state[0] * state[1]
                self.states[n] = (Z.detach(), Z.detach() + n)
            return F.mse_loss(Z, y)

    assert_parity(Module, loader=lambda: a_loader(8, 32))


def test_weights_edited_when_validation_ends(assert_parity):
    """Replicas do not seem to have drifted apart."""

    class Module(Regression):
        def on_validation_epoch_end(self):
            self.net[0].weight.data.mul_(0.99)

    assert_parity(Module, val=True, own_updates=None)


def test_a_strategy_that_says_nothing_of_own_updates_is_compared(train):
    class Strategy(ManualAllreduceStrategy):
        def reduce_gradients(self, gradients):
            super().reduce_gradients(gradients)
            if self.lightning_module.global_step >= 3:
                for _, other in gradients.values():
                    other.mul_(1 + 1e-9)

        def update_replicas(self, optimizer):
            self.updates.repeat(optimizer, self.gradients.push)

    with pytest.raises((RuntimeError, ValueError), match="replica 1"):
        train(Regression, 2, strategy=Strategy(parallel_devices=["cpu"] * 2), check=False)


def test_a_data_module_that_edits_weights(assert_parity):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return a_loader(8, 32)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.trainer.model.net[0].weight.data.clamp_(-0.2, 0.2)
            return batch

    assert_parity(Regression, loader=Data, own_updates=False)


def test_a_weight_of_batch_norm_edited_by_the_shard(train, warned):
    class Module(Regression):
        def __init__(self):
            super().__init__(batch_norm_net().double())

        def training_step(self, batch, batch_idx):
            if batch_idx > 1:
                self.net[1].weight.data.add_(batch[0].mean())
            return self.loss(batch)

    train(Module, 2, loader=lambda: a_loader(8, 32), check=False)
    assert len(warned("edits weight of BatchNorm1d")) == 1


def test_states_in_a_dict_that_a_hook_replaces_are_let_go(train):
    class Module(Regression):
        def on_train_batch_start(self, *_):
            self.state = {"h": torch.zeros(1, 3).double()}

        def loss(self, batch):
            Z = self.net(batch[0])
            self.state["h"] = Z.detach()
            self.num_kept = (
                len(self.trainer.strategy.replicas.state.hidden_states) if self._trainer else 0
            )
            return F.mse_loss(Z, batch[1])

    assert train(Module, 2, check=False).num_kept <= 2


class Ahead(torch.optim.SGD):
    """Edits weights by `.data` before its closure, as schedule-free optimizers do."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.99)
        return super().step(closure)


def test_an_optimizer_that_edits_before_its_closure(assert_parity):
    assert_parity(lambda: Regression(optimizer=lambda module: Ahead(module.parameters(), 0.1)))


def test_gradients_edited_by_the_shard_in_manual_optimization(train):
    class Module(Manual):
        def update(self, loss):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.global_step > 1:
                for param in self.parameters():
                    param.grad.data.mul_(loss.item())
            optimizer.step()

    with pytest.raises(RuntimeError, match="in the same way for every shard"):
        train(Module, 2, max_epochs=1, check=False)  # compared anyway when the next one begins


class Weighted(torchmetrics.MeanMetric):
    """Weighs classes. Their weights may be as many as a shard has samples."""

    def update(self, errors, weights):
        super().update(errors * (weights / weights.sum())[: len(errors)].mean())


def test_weights_of_classes_as_many_as_samples(train):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("classes", torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
            self.seen = []
            self.metric = Weighted()
            update = self.metric.update
            self.metric.update = lambda *args: (self.seen.append(len(args[1])), update(*args))

        def training_step(self, batch, batch_idx):
            self.metric.update(batch[0].mean(1), self.classes)
            return self.loss(batch)

    module = train(Module, 2, loader=lambda: a_loader(8, 32), check=False)
    assert module.seen and set(module.seen) == {4}


def test_weights_are_compared_in_an_epochs_last_update(train):
    """Also if a hook between epochs may edit them: a later comparison would be too late."""

    class Strategy(ManualAllreduceStrategy):
        def update_replicas(self, optimizer):
            super().update_replicas(optimizer)
            if self.lightning_module.global_step == 1:
                for _, other in self.replicas.parameter_sets.values():
                    other.data.mul_(1 + 1e-9)

    class Module(Regression):
        def on_train_epoch_end(self): ...

    strategy = Strategy(parallel_devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"replica 1 .*equal at step"):
        train(Module, 2, strategy, loader=lambda: a_loader(8, 32), max_epochs=1, check=False)
