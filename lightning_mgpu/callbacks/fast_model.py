"""Makes any model faster without a change to its code: memory format and torch.compile.

    python -m lightning_mgpu fit --fast.memory_format=channels_last --trainer.precision=bf16-mixed
    python -m lightning_mgpu fit --fast.compile=default --malloc=keep

The options of `--fast` apply to the networks in a LightningModule, its children. Losses, metrics
and the keys of checkpoints stay as they are.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_mgpu.devices import process_devices
from lightning_mgpu.errors import UsageError

# device type -> the variable that names a compiler, and the compilers looked for if it is not set
COMPILERS = {
    "cpu": ("CXX", ["g++"]),  # Inductor's kernels are C++
    "cuda": ("CC", ["gcc", "clang"]),  # Triton compiles what starts its kernels
    "xpu": ("CC", ["gcc", "clang"]),
}


class FastModel(Callback):
    """Sets the memory format before replicas are made, and compiles networks when training begins.

    Args:
        memory_format: `channels_last` stores weights and images in the order in which convolutions
            are fastest, above all in half precision.
        compile: Mode of `torch.compile`. For the CPU and for every GPU, it makes three graphs:
            forward, backward and validation. Another batch shape adds more: choose a batch size
            that divides the data. What runs after `fit` is not compiled. Modes with CUDA graphs
            are not offered: they overwrite what other replicas have returned.
    """

    def __init__(
        self,
        memory_format: Literal["channels_last"] | None = None,
        compile: Literal["default", "max-autotune-no-cudagraphs"] | None = None,
    ) -> None:
        self.memory_format = memory_format
        self.compile = compile

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.memory_format is None:
            return
        for network in networks(pl_module):
            network.to(memory_format=torch.channels_last)
            # called again when `fit` goes on to `test`
            if images_to_channels_last not in network._forward_pre_hooks.values():
                network.register_forward_pre_hook(images_to_channels_last)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.compile is None:
            return
        devices = process_devices(trainer)
        check_compiler(f"--fast.compile={self.compile}", devices)
        num_devices = len(devices)
        if num_devices > 1 and getattr(trainer.strategy, "_layer_sync", None) is not None:
            raise UsageError(
                f"--fast.compile={self.compile}: replicas meet inside the code to be compiled: "
                "leave out --trainer.sync_batchnorm=true, or take --trainer.strategy=ddp"
            )
        # every device needs its own entries
        dynamo.cache_size_limit = max(dynamo.cache_size_limit, 8 * num_devices)
        for network in networks(pl_module):
            # Parameters are inputs of a graph, so replicas on one device share it. A graph is
            # made for one device index, so k GPUs need k of each.
            network._compiled_call_impl = torch.compile(_call(network), mode=self.compile)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.compile is not None:
            # `test` runs in inference mode, which needs another graph per device. Compiling it
            # takes longer than one pass over the test set.
            for network in networks(pl_module):
                network._compiled_call_impl = None


def check_compiler(option: str, devices: Iterable[torch.device]) -> None:
    """Refuse an option that compiles if one of the devices has no compiler.

    Raises:
        UsageError: With what to install.
    """
    for device_type in sorted({device.type for device in devices} & COMPILERS.keys()):
        variable, usual = COMPILERS[device_type]
        named = os.environ.get(variable)
        if not any(shutil.which(name) for name in ([named] if named else usual)):
            install = f"install {' or '.join(usual)}, or name yours in {variable}"
            raise UsageError(f"{option} needs a compiler on {device_type}: {install}")


def networks(module: LightningModule) -> list[nn.Module]:
    """The children that compute something: all but metrics."""
    return [
        child for child in module.children() if not isinstance(child, (Metric, MetricCollection))
    ]


def _call(network: nn.Module) -> Callable[..., Any]:
    """A function, since `Module.compile` silently skips torch's own classes before torch 2.14."""
    return lambda *args, **kwargs: network._call_impl(*args, **kwargs)


def images_to_channels_last(network: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        _to_channels_last(arg) if isinstance(arg, Tensor) and arg.ndim == 4 else arg for arg in args
    )


def _to_channels_last(X: Tensor) -> Tensor:
    if X.shape[1] == 1 and X.is_contiguous():
        # Grey images are the same bytes in both orders; strides tell torch which one to use.
        _, C, H, W = X.shape
        return X.as_strided(X.shape, (C * H * W, 1, W * C, C))
    return X.contiguous(memory_format=torch.channels_last)
