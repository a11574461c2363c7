"""The layer alone: replicas' outputs, gradients, and gradients of gradients are those of torch's on the whole batch."""

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.strategies.layers.sync_batchnorm import synchronize_batch_norm
from lightning_mgpu.strategies.threads.team import Team

LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = [(7, 5), (7, 5, 9), (7, 5, 4, 3), (7, 5, 2, 3, 2)]


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team([torch.device("cpu")] * 2)
    yield team
    team.close()


def synchronised(layer: nn.Module, team: Team, X: Tensor) -> tuple[Tensor, list[nn.Module]]:
    """The layer's output for a batch split 2 : 5, and the replicas' layers."""
    layers = [deepcopy(layer) for _ in range(2)]
    synchronize_batch_norm(layers, team)
    parts = X.split([2, 5])
    return torch.cat(team.run(lambda i: layers[i](parts[i]), [0, 1])), layers


def a_batch(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 2 + offset).to(dtype).requires_grad_()


def a_layer(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> nn.Module:
    layer = LAYERS[len(shape)](5, affine=affine, dtype=dtype)
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_and_their_gradients(shape: tuple[int, ...], affine: bool, team: Team) -> None:
    torch.manual_seed(0)
    layer, X = a_layer(shape, torch.float64, affine), a_batch(shape, torch.float64, offset=3)
    v, w = torch.randn(2, *shape, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(layer(X), X, v, create_graph=True)
    (wanted2,) = torch.autograd.grad(wanted, X, w)
    for create_graph in (False, True):
        Y, _ = synchronised(layer, team, X)
        (found,) = torch.autograd.grad(Y, X, v, create_graph=create_graph)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    (found2,) = torch.autograd.grad(found, X, w)
    torch.testing.assert_close(found2, wanted2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_get_their_parts_of_the_gradient(shape: tuple[int, ...], create_graph: bool, team: Team) -> None:
    torch.manual_seed(0)
    layer, X = a_layer(shape, torch.float64, affine=True), a_batch(shape, torch.float64, offset=3)
    v = torch.randn(shape, dtype=torch.float64)
    wanted = torch.autograd.grad(layer(X), list(layer.parameters()), v)
    Y, layers = synchronised(layer, team, X)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    found = torch.autograd.grad(Y, parameters, v, create_graph=create_graph)
    for one, other, whole in zip(found[:2], found[2:], wanted, strict=True):
        torch.testing.assert_close(one + other, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_lower_precisions(dtype: torch.dtype, atol: float, memory_format: torch.memory_format, team: Team) -> None:
    """Images in half precision, the layer in single, as autocast leaves them; far from zero, no digit is lost."""
    torch.manual_seed(0)
    shape = (7, 5, 6, 6)
    layer = a_layer(shape, torch.float32, affine=True)
    for offset in (0.0, 50.0):
        X = a_batch(shape, dtype, offset).detach().to(memory_format=memory_format).requires_grad_()
        v = torch.randn(shape)
        exact, X64 = deepcopy(layer).double(), X.detach().double().requires_grad_()
        wanted = exact(X64)
        Y, layers = synchronised(layer, team, X)
        assert Y.dtype == dtype and Y.is_contiguous(memory_format=memory_format)
        torch.testing.assert_close(Y.double(), wanted, rtol=0, atol=5 * atol)
        (found,) = torch.autograd.grad(Y, X, v.to(dtype))
        (gradient,) = torch.autograd.grad(wanted, X64, v.double())
        torch.testing.assert_close(found.double(), gradient, rtol=0, atol=5 * atol)
        for one in layers:
            assert one.running_mean.dtype == torch.float32
            torch.testing.assert_close(one.running_mean.double(), exact.running_mean, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(one.running_var.double(), exact.running_var, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", [deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deep", "pickled"])
def test_a_copy_is_a_layer_of_its_own(copied: Callable[[nn.Module], nn.Module], team: Team) -> None:
    """A callback that averages weights makes one while training runs."""
    layers = [nn.BatchNorm1d(5), nn.BatchNorm1d(5)]
    synchronize_batch_norm(layers, team)
    own, X = copied(layers[1]), torch.randn(4, 5)
    layers[1].running_mean.fill_(9.0)
    torch.testing.assert_close(own(X), nn.BatchNorm1d(5)(X))
    torch.testing.assert_close(own.running_mean, 0.1 * X.mean(0))
    team.run(lambda i: own(X), [0, 1])  # which does not meet the others
    assert layers[1].num_batches_tracked == 0


class Activated(nn.BatchNorm1d):
    """Does more than normalise, as timm's `BatchNormAct2d`."""

    def forward(self, X: Tensor) -> Tensor:
        self._check_input_dim(X)
        is_training = self.training or self.running_mean is None
        Y = F.batch_norm(
            X, self.running_mean, self.running_var, self.weight, self.bias, training=is_training, momentum=0.2
        )
        return torch.relu(Y)


def frozen(layer: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """As `BaseFinetuning.freeze(module, train_bn=False)` leaves it."""
    layer.track_running_stats = False
    return layer


LAYERS_OF_ALL_KINDS = {
    "activated": lambda: Activated(5),
    "frozen": lambda: frozen(nn.BatchNorm1d(5)),
    "cumulative": lambda: nn.BatchNorm1d(5, momentum=None),
    "untracked": lambda: nn.BatchNorm1d(5, track_running_stats=False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", LAYERS_OF_ALL_KINDS)
def test_layers_of_all_kinds(kind: str, training: bool, team: Team) -> None:
    torch.manual_seed(0)
    layer = LAYERS_OF_ALL_KINDS[kind]().double().train(training)
    nn.init.normal_(layer.weight)
    X = a_batch((7, 5), torch.float64, offset=3).detach()
    Y, layers = synchronised(layer, team, X)
    torch.testing.assert_close(Y, layer(X), rtol=1e-12, atol=1e-12)
    for own in layers:
        assert own.state_dict().keys() == layer.state_dict().keys()
        for name, tensor in layer.state_dict().items():
            torch.testing.assert_close(own.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)
