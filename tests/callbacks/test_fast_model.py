"""Memory format, compile, resident data, fused optimizers, precision, under any strategy."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mgpu.callbacks import FastModel, fast_model
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.devices import process_devices
from lightning_mgpu.errors import UsageError
from lightning_mgpu.models import LeNet

DEVICES = {"auto": 1, "dp": 2, "manual_allreduce": 2}


@pytest.fixture
def train(make_trainer: Callable, root: Path) -> Callable[..., LeNet]:
    """Trains LeNet for an epoch of 402 images in batches of 64; the last one is smaller."""

    def run(
        strategy: str = "auto",
        fast: Any = None,
        data: Any = None,
        optimizer: Any = None,
        **options: Any,
    ) -> LeNet:
        torch.manual_seed(0)
        model = LeNet(
            partial(SGD, lr=0.1, momentum=0.9, **(optimizer or {})),
            lr_scheduler=partial(OneCycleLR, max_lr=0.1),
        )
        images = FashionMNIST(
            **{
                "root": str(root),
                "batch_size": 64,
                "val_size": 101,
                "augment": True,
                **(data or {}),
            }
        )
        callbacks = [FastModel(**(fast or {})), *options.pop("callbacks", [])]
        trainer = make_trainer(
            strategy=strategy, devices=DEVICES[strategy], callbacks=callbacks, **options
        )
        trainer.fit(model, images)
        return model

    return run


def difference(first: nn.Module, second: nn.Module) -> float:
    """The largest relative difference of a parameter."""
    pairs = zip(first.parameters(), second.parameters())
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


class Activations(Callback):
    """Looks in every replica whether inputs and weights of convolutions are in channels_last."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for layer in pl_module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(self._look)  # replicas share it

    def _look(self, layer: nn.Conv2d, args: tuple[Tensor, ...]) -> None:
        for tensor in (args[0], layer.weight):
            strides = [tensor.stride(d) for d in (0, 2, 3, 1)]
            self.found.append(strides == sorted(strides, reverse=True) and tensor.stride(1) == 1)


@pytest.mark.parametrize("strategy", DEVICES)
def test_memory_format_resident_data_and_fused_optimizer_change_nothing(
    strategy: str, train: Callable
) -> None:
    data, optimizer = {"device_resident": True}, {"fused": True, "nesterov": False}
    plain = train(callbacks=[in_plain := Activations()])
    fast = train(
        strategy,
        {"memory_format": "channels_last"},
        data,
        optimizer,
        callbacks=[in_fast := Activations()],
    )
    assert difference(fast, plain) < 1e-4
    assert not all(in_plain.found) and in_fast.found and all(in_fast.found)
    for precision in ("bf16-mixed", "bf16-true"):
        fast = train(strategy, {"memory_format": "channels_last"}, precision=precision)
        assert next(fast.parameters()).dtype == (
            torch.bfloat16 if precision == "bf16-true" else torch.float32
        )
        assert difference(fast, plain) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
def test_a_compiled_model_trains_the_same(strategy: str, train: Callable) -> None:
    class Compiled(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert pl_module.net._compiled_call_impl is not None

    short = {"max_steps": 4, "limit_val_batches": 1}
    fast = train(strategy, {"compile": "default"}, callbacks=[Compiled()], **short)
    assert difference(fast, train(strategy, **short)) < 1e-4
    assert list(fast.state_dict()) == list(LeNet().state_dict())


def test_what_cannot_be_compiled_is_refused(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UsageError, match=r"--fast\.compile=default: .* leave out --trainer\.sync_batchnorm=true"
    ):
        train("manual_allreduce", {"compile": "default"}, sync_batchnorm=True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"needs a compiler on \w+: install g"):
        train(fast={"compile": "default"})


@pytest.mark.parametrize(
    ("kind", "there", "variables", "error"),
    [
        ("cpu", "g++", {}, ""),
        ("cpu", "gcc", {}, r"on cpu: install g\+\+, or name yours in CXX"),
        ("cpu", "mine", {"CXX": "mine"}, ""),
        ("cuda", "gcc", {}, ""),
        ("cuda", "clang", {}, ""),
        ("cuda", "g++", {}, "on cuda: install gcc or clang, or name yours in CC"),
        ("cuda", "gcc", {"CC": "mine"}, "on cuda"),
        ("mps", "", {}, ""),  # Metal brings its own
    ],
)
def test_the_compiler_that_a_device_needs(
    kind: str, there: str, variables: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == there else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = pytest.raises(UsageError, match=error) if error else contextlib.nullcontext()
    with refused:
        fast_model.check_compiler("--fast.compile=default", [torch.device(kind, 0)])


@pytest.mark.parametrize("strategy", DEVICES)
def test_graphs(strategy: str, train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three per device: replicas on one device share them, and the test after `fit` adds none."""
    graphs: list[str] = []

    def counted(kind: str) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            graphs.append(kind)
            return make_boxed_func(graph.forward)

        return compiler

    kinds = {"fw_compiler": "forward", "bw_compiler": "backward", "inference_compiler": "inference"}
    backend = aot_autograd(**{name: counted(kind) for name, kind in kinds.items()})
    compile = torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda call, mode: compile(call, backend=backend))
    monkeypatch.setattr(fast_model, "check_compiler", lambda option, devices: None)
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1}
    model = train(strategy, {"compile": "default"}, {"augment": False}, **limits)
    num_devices = len(set(process_devices(model.trainer)))
    expected = sorted(num_devices * list(kinds.values()))
    assert sorted(graphs) == expected
    model.trainer.test(model, datamodule=model.trainer.datamodule, verbose=False)
    assert sorted(graphs) == expected


class Waits(TorchDispatchMode):
    """Counts where the host waits for a value of the device."""

    num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        self.num_waits += func.overloadpacket in [getattr(torch.ops.aten, name) for name in waits]
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(train: Callable) -> None:
    """Steps that log the loss do not wait either, nor do the steps after them."""

    def waits(num_steps: int) -> int:
        with Waits() as mode:
            data = {"device_resident": True, "batch_size": 16}
            options = {"max_steps": num_steps, "log_every_n_steps": 1}
            train("auto", {"memory_format": "channels_last"}, data, {"fused": True}, **options)
        return mode.num_waits

    assert waits(20) == waits(4)


def test_resident_images_and_batches_are_on_the_device(make_trainer: Callable, root: Path) -> None:
    """`meta` stands in for a GPU: its tensors can be told apart from the CPU's."""
    data = FashionMNIST(
        root=str(root), batch_size=64, val_size=101, augment=True, device_resident=True
    )
    trainer = make_trainer()
    data.trainer = trainer
    trainer.strategy._root_device = torch.device("meta")
    data.prepare_data()
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        (epoch, indices), *_ = loader.sampler
        X, y = loader.dataset[epoch, indices]
        assert {t.device.type for t in (X, y, indices, loader.dataset.images)} == {"meta"}
        assert loader.dataset.images.dtype == torch.uint8 and X.dtype == torch.float32
        assert not loader.pin_memory


SHORT = (
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--data.batch_size=4",
    "--fast.compile=null",
)
LIMITS = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))

# where a CPU has no instructions for bfloat16, Muon's 3 `ns_steps` in a batch take half a minute
ONE_OF_MUON = ("--model.optimizer.ns_steps=1", "--trainer.limit_train_batches=1")
RECIPES = {"resnet18_2dev": (), "resnet18_fast": ONE_OF_MUON}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train(recipe: str, main: Callable[..., int], root: Path) -> None:
    options = (f"--config=experiment/{recipe}.yaml", *SHORT, *LIMITS, *RECIPES[recipe])
    assert main("fit", *options, f"--data.root={root}") == 0


SCRIPT = """
import torch
from lightning_mgpu.malloc import keep_freed_memory

def held():  # pages of address space: what malloc asked for, whatever the kernel does behind it
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0])

keep_freed_memory()
torch.zeros(50_000_000)
before = held()
tensor = torch.zeros(25_000_000)
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_what_a_step_frees_is_there_in_the_next() -> None:
    """A tensor of 100 MB takes nothing from the kernel after a larger one was freed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) == 0
