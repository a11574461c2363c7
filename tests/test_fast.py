"""Memory format, compile, resident data, fused optimizers, precision: under every strategy, and equal to none."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mgpu.callbacks import FastModel, fast_model
from lightning_mgpu.callbacks.fast_model import networks
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet, ResNet18
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.strategies.threads.team import _Modes

DEVICES = {"auto": 1, "dp": 2, "manual_allreduce": 2}


@pytest.fixture
def train(make_trainer: Callable, root: Path) -> Callable[..., LeNet]:
    """Trains LeNet for an epoch of 402 images in batches of 64; the last one is smaller."""

    def run(strategy: str = "auto", fast: Any = None, data: Any = None, optimizer: Any = None, **options: Any) -> LeNet:
        torch.manual_seed(0)
        model = LeNet(partial(SGD, lr=0.1, momentum=0.9, **(optimizer or {})), partial(OneCycleLR, max_lr=0.1))
        images = FashionMNIST(**{"root": str(root), "batch_size": 64, "val_size": 101, "augment": True, **(data or {})})
        callbacks = [FastModel(**(fast or {})), *options.pop("callbacks", [])]
        trainer = make_trainer(strategy=strategy, devices=DEVICES[strategy], callbacks=callbacks, **options)
        trainer.fit(model, images)
        return model

    return run


def difference(first: nn.Module, second: nn.Module) -> float:
    """The largest relative difference of a parameter."""
    pairs = zip(first.parameters(), second.parameters())
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


@pytest.mark.parametrize("strategy", DEVICES)
def test_memory_format_resident_data_and_fused_optimizer_change_nothing(strategy: str, train: Callable) -> None:
    plain = train()
    fast = train(
        strategy, {"memory_format": "channels_last"}, {"device_resident": True}, {"fused": True, "nesterov": False}
    )
    assert difference(fast, plain) < 1e-4


@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_near(strategy: str, precision: str, train: Callable) -> None:
    fast = train(strategy, {"memory_format": "channels_last"}, precision=precision)
    assert next(fast.parameters()).dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert difference(fast, train()) < 0.1


class Activations(Callback):
    """Whether what every convolution gets and holds is in channels_last, in every replica."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for layer in pl_module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(self._look)  # replicas share it

    def _look(self, layer: nn.Conv2d, args: tuple[Tensor, ...]) -> None:
        order = (0, 2, 3, 1)
        for tensor in (args[0], layer.weight):
            strides = [tensor.stride(d) for d in order]
            self.found.append(strides == sorted(strides, reverse=True) and tensor.stride(1) == 1)


@pytest.mark.parametrize("strategy", DEVICES)
def test_images_and_weights_are_channels_last(strategy: str, train: Callable) -> None:
    short = {"data": {"augment": False}, "max_steps": 2, "limit_val_batches": 0}
    plain, fast = Activations(), Activations()
    train(strategy, callbacks=[plain], **short)
    train(strategy, {"memory_format": "channels_last"}, callbacks=[fast], **short)
    num_looks = 2 * DEVICES[strategy] * 2 * 2  # steps, replicas, convolutions, image and weight
    assert len(plain.found) == len(fast.found) == num_looks
    assert not any(plain.found) and all(fast.found)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
def test_compiled_model_trains_the_same(strategy: str, train: Callable) -> None:
    short = {"max_steps": 4, "limit_val_batches": 1}
    calls = []

    class Compiled(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            replicas = getattr(trainer.strategy, "replicas", lambda: [pl_module])()
            calls.extend(network._compiled_call_impl is not None for r in replicas for network in networks(r))

    fast = train(strategy, {"compile": "default"}, callbacks=[Compiled()], **short)
    assert calls == [True] * DEVICES[strategy]
    assert difference(fast, train(strategy, **short)) < 1e-4
    assert list(fast.state_dict()) == list(LeNet().state_dict())


@pytest.mark.parametrize("strategy", ["dp", "manual_allreduce"])
def test_all_of_many_replicas_are_compiled(strategy: str, train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs each is compiled for its own device; here each gets a class of its own, which needs no less."""
    compiled, compile_call = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, mode: compile_call(call, backend=compiled))
    monkeypatch.setitem(DEVICES, strategy, 6)

    class OneClassEach(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            for replica in trainer.strategy.replicas():
                layer = next(layer for layer in replica.modules() if isinstance(layer, nn.AvgPool2d))
                layer.__class__ = type("OfOneReplica", (nn.AvgPool2d,), {})

    torch._dynamo.reset()
    train(strategy, {"compile": "default"}, callbacks=[OneClassEach()], limit_train_batches=2, limit_val_batches=2)
    assert compiled.frame_count == 6 + 6  # for training and for evaluation


@pytest.mark.parametrize("strategy", ["dp", "manual_allreduce"])
def test_networks_of_users_classes_are_compiled_each(
    strategy: str, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are given the attributes of such networks before every step; what calls the original is none of them."""
    monkeypatch.setattr(torch, "compile", lambda call, mode: lambda *args: call(*args))
    compiled = []

    class Users(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.net.__class__ = type("Users", (nn.Sequential,), {})

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            compiled.extend(replica.net._compiled_call_impl for replica in trainer.strategy.replicas())

    train(strategy, {"compile": "default"}, callbacks=[Users()], max_steps=2, limit_val_batches=0)
    assert None not in compiled and len(set(compiled)) == DEVICES[strategy]


@pytest.mark.parametrize("strategy", ["dp", "manual_allreduce"])
def test_what_replicas_cannot_compile_is_refused(strategy: str, train: Callable) -> None:
    with pytest.raises(UsageError, match=r"reduce-overhead .* take --fast\.compile=default"):
        train(strategy, {"compile": "reduce-overhead"})
    with pytest.raises(UsageError, match=r"--fast\.compile=default: with --trainer\.sync_batchnorm=true"):
        train(strategy, {"compile": "default"}, sync_batchnorm=True)

    class Rows(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.rows = nn.Embedding(3, 2, max_norm=1.0)

    with pytest.raises(UsageError, match=r"--fast\.compile=default: with Embedding\(max_norm=\.\.\.\)"):
        train(strategy, {"compile": "default"}, callbacks=[Rows()])


def test_compile_needs_a_compiler(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"--fast\.compile=default needs a C\+\+ compiler"):
        train(fast={"compile": "default"})


def test_a_gpu_needs_a_c_compiler(train: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For Triton's launchers; `$CC` may name another one."""
    monkeypatch.setattr(fast_model, "own_devices", lambda trainer: [torch.device("cuda:0")])
    monkeypatch.setattr(torch, "compile", lambda call, **options: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"--fast\.compile=default needs a C compiler: install gcc"):
        train(fast={"compile": "default"})
    (tmp_path / "my-cc").touch(mode=0o755)
    monkeypatch.setenv("CC", "my-cc")
    train(fast={"compile": "default"}, max_steps=1)


def test_cuda_graphs_take_no_accumulation(train: Callable) -> None:
    """The gradients of a batch are outputs of its graph, which the next batch overwrites."""
    with pytest.raises(UsageError, match=r"reduce-overhead: .* take --fast\.compile=default, or --trainer\.accumulate"):
        train(fast={"compile": "reduce-overhead"}, accumulate_grad_batches=2)


def test_every_batch_begins_a_step_of_cuda_graphs(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch takes every call of a network for a step, and frees what the call before returned."""
    marks: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    train(fast={"compile": "reduce-overhead"}, limit_train_batches=3, limit_val_batches=2)
    assert len(marks) == 3 + 2
    train(fast={"compile": "default"}, limit_train_batches=3)
    assert len(marks) == 3 + 2


class Waits(TorchDispatchMode):
    """Counts where the host waits for a value of the device; a mode is one thread's: several share a count."""

    def __init__(self, counts: list[Any]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        states = func is torch.ops.aten.equal.default and args[0].dtype == torch.uint8  # random numbers', on the CPU
        if func.overloadpacket in [getattr(torch.ops.aten, name) for name in names] and not states:
            self.counts.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", DEVICES)
def test_no_step_waits_for_the_device(strategy: str, train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not those that log the loss, or come after one."""
    entered, thread = _Modes.entered, threading.get_ident()
    counts: list[Any] = []

    @contextlib.contextmanager
    def watched(self: _Modes, device: torch.device) -> Iterator[None]:
        with entered(self, device), Waits(counts) if threading.get_ident() != thread else contextlib.nullcontext():
            yield

    def waits(num_steps: int) -> int:
        counts.clear()
        with Waits(counts):
            data = {"device_resident": True, "batch_size": 16}
            options = {"max_steps": num_steps, "log_every_n_steps": 1}
            train(strategy, {"memory_format": "channels_last"}, data, {"fused": True}, **options)
        return len(counts)

    monkeypatch.setattr(_Modes, "entered", watched)
    assert waits(20) == waits(4)


def test_resident_images_and_batches_are_on_the_device(make_trainer: Callable, root: Path) -> None:
    """`meta` stands in for a GPU: what is there can be told apart from the CPU."""
    data = FashionMNIST(root=str(root), batch_size=64, val_size=101, augment=True, device_resident=True)
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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--fast.memory_format=nchw"], ["--fast.memory_format=nchw", "channels_last"]),
        (["--fast.compile=fastest"], ["--fast.compile=fastest", "reduce-overhead"]),
        (["--data.device_resident=true", "--data.num_workers=2"], ["data.device_resident", "num_workers"]),
        (["--model.label_smoothing=2"], ["model.label_smoothing=2", "0 (none) to 1"]),
        (["--model.init=best"], ["--model.init=best", "kaiming"]),
        (["--data.crop_padding=-1"], ["data.crop_padding=-1"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str], words: list[str], main: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main("fit", "--data.source=synthetic", *args) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("update", ["--model.optimizer.fused=true", "--fast.compile_optimizer=true"])
def test_all_of_it_under_ddp(update: str, command: Any, root: Path, tmp_path: Path) -> None:
    fast = ("--fast.memory_format=channels_last", "--fast.compile=default", "--data.device_resident=true")
    other = (update, "--trainer.precision=bf16-mixed", "--data.augment=true", "--malloc=keep")
    limits = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    run = ("--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_epochs=1")
    images = ("--data.source=synthetic", "--data.batch_size=8", "--run_dir=run")
    code, out, err = command("fit", *run, *images, *fast, *other, *limits, timeout=200)
    assert code == 0, err
    assert "test acc" in out and (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.slow
def test_recipes_train(main: Callable[..., int], root: Path, tmp_path: Path) -> None:
    small = ("--no-wandb", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--data.batch_size=4")
    limits = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    not_compiled = ("--fast.compile=null", "--fast.compile_optimizer=false")
    for recipe, flags in (("lenet_fast", ()), ("resnet18_2dev", ()), ("resnet18_fast", not_compiled)):
        args = (f"--config=experiment/{recipe}.yaml", f"--data.root={root}", f"--run_dir={recipe}")
        assert main("fit", *args, *small, *limits, *flags) == 0
        assert (tmp_path / recipe / "checkpoints" / "last.ckpt").exists()


def test_kaiming_keeps_the_size_of_activations() -> None:
    torch.manual_seed(0)
    X = torch.randn(64, 1, 28, 28)
    for model in (LeNet(init="kaiming"), ResNet18(init="kaiming")):
        assert 0.1 < model(X).std().item() < 10
    assert LeNet()(X).std().item() < 1e-3  # the book's
