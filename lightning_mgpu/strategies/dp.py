"""`dp`, data parallelism as in `torch.nn.DataParallel`, which the Lightning Trainer dropped in 2.0.

python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=dp
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module
from torchmetrics import Metric
from typing_extensions import override

from lightning_mgpu.strategies.loss import split_loss
from lightning_mgpu.strategies.split_batch import (
    cut,
    join_outputs,
    num_samples,
    shard_sizes,
    weighted_mean,
)


class DataParallelStrategy(SingleDeviceStrategy):
    """One process and one set of parameters, copied to the other devices for every step.

    Each device runs the step on its shard of the batch with copies of the parameters. Autograd
    knows the copies, so one backward pass of the mean loss adds all gradients up on the first
    device, where one optimizer makes the update. In `manual_allreduce` every device has its own
    parameters and optimizer: all get the sum of the gradients, and every replica updates itself.

    Python objects see one call of the step per shard. Buffers are the first shard's, BatchNorm's
    running statistics too. Shards on one device draw their random numbers one after the other; two
    GPUs seeded alike draw the same. Activations that `torch.utils.checkpoint` computes again need
    all shards on one device.

    Args:
        split: The devices' shares of a batch, for example `[0.7, 0.3]`. Equal by default.
        parallel_devices: Instead of the Trainer's. A device may occur twice, or a CPU beside GPUs.
    """

    def __init__(
        self,
        split: Sequence[float] | None = None,
        parallel_devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        super().__init__()
        self.split = split
        self.parallel_devices = [torch.device(device) for device in parallel_devices or ()]
        # the Trainer sets these, and then calls `_configure_launcher`
        self.num_nodes, self._layer_sync, self.cluster_environment = 1, None, None

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @override
    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        if self.num_nodes * environment.world_size() > 1:
            _refuse("is one process on one machine. Start it without a launcher, or use ddp.")
        if self._layer_sync is not None:
            _refuse("has no sync_batchnorm. Use manual_allreduce or ddp.")
        num_devices = len(self.parallel_devices)
        if self.split and (len(self.split) != num_devices or min(self.split) <= 0):
            _refuse(f"has split={[*self.split]}, which must be {num_devices} positive shares.")

    @override
    def training_step(self, *args: Any) -> Any:
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            _refuse("has no manual optimization. Use manual_allreduce or ddp.")
        outputs, sizes = self._run_shards("training_step", *args)
        losses, weights = zip(*map(split_loss, outputs))
        if all(loss is None for loss in losses):
            return None
        given = [weight for weight in weights if weight is not None]
        if None in losses or (given and (len(given) < len(weights) or not sum(given))):
            _refuse("needs a loss from every shard, and weights from all or none, with a sum > 0.")
        if given and module.trainer.accumulate_grad_batches > 1:
            _refuse("has no weights over accumulated batches. Use manual_allreduce.")
        loss = weighted_mean(losses, given or sizes)
        is_dict = isinstance(outputs[0], Mapping)
        return {**join_outputs(outputs, sizes), "loss": loss} if is_dict else loss

    @override
    def validation_step(self, *args: Any) -> Any:
        return join_outputs(*self._run_shards("validation_step", *args))

    @override
    def test_step(self, *args: Any) -> Any:
        return join_outputs(*self._run_shards("test_step", *args))

    @override
    def predict_step(self, *args: Any) -> Any:
        return join_outputs(*self._run_shards("predict_step", *args))

    def _run_shards(self, step: str, batch: Any, *args: Any) -> tuple[list[Any], list[int]]:
        """Call a step of the module for every shard. Returns the outputs, and the shards' sizes."""
        module: Any = self.lightning_module
        root, num_devices = self.root_device, len(self.parallel_devices)
        size = num_samples(batch) if num_devices > 1 else 1
        if step == "training_step" and size < num_devices:
            _refuse(f"cannot split {size} samples over {num_devices} devices. Use drop_last=True.")
        sizes = shard_sizes(size, self.split or [1] * num_devices)
        if not sizes[0]:  # the first device's buffers are kept
            sizes[0], sizes[sizes.index(max(sizes))] = 1, max(sizes) - 1
        # All copies are made before the first shard runs, which may edit buffers and weights.
        shards = [
            (shard, device, _copy_tensors(module, device) if i else {})
            for i, (shard, device) in enumerate(zip(cut(batch, sizes), self.parallel_devices))
            if sizes[i]
        ]
        results, outputs = module.trainer._results, []
        for shard, device, copies in shards:
            # Tensors on other devices than the first stay there, for example lengths on the CPU.
            shard = apply_to_collection(
                shard, Tensor, lambda X, to=device: X.to(to) if X.device == root else X
            )
            if results is not None:  # `self.log` takes the size of the shard
                results.batch, results.batch_size = shard, None
            with self.precision_plugin.forward_context(), _use_tensors(module, copies, device):
                outputs.append(getattr(module, step)(shard, *args))
        if results is not None:
            results.batch, results.batch_size = batch, None
        return outputs, [size for size in sizes if size]


def _copy_tensors(module: Any, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers, without those of metrics, which stay on the first device."""
    metrics = [f"{name}." for name, each in module.named_modules() if isinstance(each, Metric)]
    return {
        name: tensor.to(device, copy=True)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not name.startswith(tuple(metrics))
    }


@contextmanager
def _use_tensors(module: Any, tensors: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Let a module compute on another device, with other parameters and buffers."""
    metrics: list[Any] = [each for each in module.modules() if isinstance(each, Metric)]
    for metric in metrics:
        metric.update = partial(_update_on_own_device, metric, metric.update)
    root_device, module._device = module.device, device
    try:
        with _reparametrize_module(module, tensors, tie_weights=True):
            yield
    finally:
        module._device = root_device
        for metric in metrics:
            metric.update = metric.update.args[1]


def _update_on_own_device(metric: Metric, update: Any, *args: Any, **kwargs: Any) -> None:
    args, kwargs = move_data_to_device((args, kwargs), metric.device)
    update(*args, **kwargs)


def _refuse(reason: str) -> NoReturn:
    raise MisconfigurationException(f"Strategy dp {reason}")
