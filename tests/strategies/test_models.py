"""Models that are more than plain layers: objects with hooks, marked parameters, parametrized and scripted layers."""

import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchvision import tv_tensors
from torchvision.transforms import v2

pytestmark = pytest.mark.slow


class Saved:
    """The classic hook: keeps what a layer has answered."""

    def __init__(self, layer: nn.Module) -> None:
        self.handle, self.features = layer.register_forward_hook(self.hook), torch.zeros(())

    def hook(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.features = output


@pytest.mark.parametrize("container", [list, tuple, lambda items: {"all": list(items)}])
def test_hooks_of_objects_in_containers(Regression, assert_parity, container):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.saved = container([Saved(self.net[0]), Saved(self.net[2])])

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            saved = self.saved["all"] if isinstance(self.saved, dict) else self.saved
            return loss + sum(each.features.square().mean() for each in saved)

    assert_parity(Module)


def test_marks_on_parameters(Regression, assert_parity):
    class Marked(nn.Parameter):
        pass

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.scale = Marked(torch.ones(3, dtype=torch.float64))
            self.scale.tag, self.net[0].weight.decay = 2.0, 0.5

        def on_train_epoch_start(self):
            self.net[2].weight.decay = 0.1 * (1 + self.current_epoch)

        def training_step(self, batch, batch_idx):
            decay = sum(p.decay * p.square().sum() for p in self.parameters() if hasattr(p, "decay"))
            return self.loss(batch) + 0.1 * decay + (self.scale * self.scale.tag).square().mean()

    assert_parity(Module)


class Symmetric(nn.Module):
    def forward(self, W: torch.Tensor) -> torch.Tensor:
        return W.triu() + W.triu(1).mT


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.eye(6, dtype=torch.float64)), []

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        self.seen.extend(X[:, 0].tolist())
        return X @ self.weight * self.settings["tau"]


def test_parametrized_layers_of_ones_own(Regression, assert_parity):
    """`register_parametrization` makes a class that says it is torch's."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.own, self.w = Keeping(), nn.Parameter(torch.eye(3, dtype=torch.float64))
            parametrize.register_parametrization(self.own, "weight", Symmetric())
            parametrize.register_parametrization(self, "w", Symmetric())

        def on_train_epoch_start(self):
            self.own.settings, self.tau = {"tau": 1.0 + self.current_epoch}, 0.5

        def loss(self, batch):
            X, y = batch
            return F.mse_loss(self.net(self.own(X)) @ self.w * self.tau, y)

    one, *others = assert_parity(Module)
    for other in others:
        assert other.own.seen == one.own.seen


def test_lists_on_torchs_own_layers(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.net.outputs, self.net.settings = [], {"scale": 1.0}

        def on_train_epoch_start(self):
            self.net.settings["scale"] += 0.5

        def training_step(self, batch, batch_idx):
            self.net.outputs.append(batch[1])
            return self.loss(batch) * self.net.settings["scale"]

    one, *others = assert_parity(Module)
    for other in others:
        assert torch.equal(torch.cat(other.net.outputs), torch.cat(one.net.outputs))


@pytest.mark.parametrize("manual", [False, True])
def test_hooks_on_gradients_put_there_by_the_step(Regression, assert_parity, manual):
    class Module(Regression):
        handle = None

        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            if self.handle is not None:
                self.handle.remove()
            self.handle = self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
            if not manual:
                return self.loss(batch)
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    assert_parity(Module)


def test_scripted_layers_know_whether_they_train(Regression, train):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
            self.modes = []

        def validation_step(self, batch, batch_idx):
            self.modes.append(self.scripted.training)

        def training_step(self, batch, batch_idx):
            self.modes.append(self.scripted.training)
            return self.loss(batch)

    for k in (1, 2):
        module = train(Module, k, val=True, num_sanity_val_steps=0, max_epochs=1)
        half = len(module.modes) // 2
        assert module.modes == [True] * half + [False] * half


def test_subclasses_and_attributes_of_batch_tensors(Regression, assert_parity, make_loader):
    def collate(samples):
        X, y = map(torch.stack, zip(*samples))
        image = tv_tensors.Image(X.view(-1, 1, 2, 3))
        y.scale = 2.0
        return {"image": image, "boxes": tv_tensors.BoundingBoxes(X[:, :4].abs(), format="XYXY", canvas_size=(9, 9))}, y

    class Module(Regression):
        def loss(self, batch):
            X, y = batch
            flipped = v2.functional.horizontal_flip(X["image"]).flatten(1)
            boxes = v2.functional.horizontal_flip(X["boxes"])
            losses = (self.net(flipped.as_subclass(torch.Tensor)) - y).square().mean(1)
            return y.scale * (losses * boxes.as_subclass(torch.Tensor).mean(1)).mean()

    assert_parity(Module, loader=make_loader(collate_fn=collate))


def test_weak_references(Regression, assert_parity):
    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            self.parent = weakref.ref(parent)

        def forward(self, X):
            self.parent().inputs = X
            return self.parent().net(X)

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.child = Child(self)

        def loss(self, batch):
            return F.mse_loss(self.child(batch[0]) * self.inputs[:, :3], batch[1])

    assert_parity(Module)


def test_expanded_buffers(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).expand(4, 3))

        def loss(self, batch):
            return F.mse_loss(self.net(batch[0]) * self.mask[0], batch[1])

    assert_parity(Module)


@pytest.mark.filterwarnings("ignore:A batch whose parts differ", "ignore:The PyTorch API of nested tensors")
def test_nested_tensors_go_whole_to_one_device(Regression, assert_parity, make_loader):
    def collate(samples):
        X, y = map(torch.stack, zip(*samples))
        return torch.nested.nested_tensor([x[: 3 + i % 3] for i, x in enumerate(X)]), X, y

    class Module(Regression):
        def loss(self, batch):
            return super().loss(batch[1:]) + 0.1 * torch.nested.to_padded_tensor(batch[0], 0.0).mean()

    assert_parity(Module, loader=make_loader(collate_fn=collate))


def test_steps_that_begin_to_fork_the_generator(Regression, train):
    """They draw what one replica after another draws, from the second such step on."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def training_step(self, batch, batch_idx):
            if batch_idx >= 2 or self.current_epoch:
                with torch.random.fork_rng():
                    torch.manual_seed(batch_idx)
                    for _ in range(100):
                        noise = torch.randn(2000)
                    self.drawn.append(float(noise.sum()))
            return self.loss(batch)

    one, two = train(Module), train(Module, 2)
    expected = [value for value in one.drawn[2:5] for _ in range(2)]  # batches 0 to 2 of the second epoch
    assert two.drawn[-7:-1] == expected


def laplacian(module, X):
    hessian = torch.func.vmap(torch.func.hessian(lambda x: module.net(x)[0]))(X)
    return hessian.diagonal(dim1=1, dim2=2).sum(1)


def directional(module, X):
    with torch.autograd.forward_ad.dual_level():
        time.sleep(0.003)  # the other replicas come, too
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        return torch.autograd.forward_ad.unpack_dual(module.net(dual)).tangent.sum(1)


@pytest.mark.parametrize("derivative", [laplacian, directional])
def test_forward_mode_derivatives(Regression, assert_parity, derivative):
    """Their level is one for the whole process."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) + 0.1 * derivative(self, batch[0]).square().mean()

    for _ in range(3):
        assert_parity(Module, (3,))


def test_replicas_do_not_meet_inside_forward_mode(Regression, train):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            with torch.autograd.forward_ad.dual_level():
                self.manual_backward(self.loss(batch))

    with pytest.raises(RuntimeError, match="inside forward-mode AD"):
        train(Module, 2)
    with torch.autograd.forward_ad.dual_level():  # it was left
        pass
