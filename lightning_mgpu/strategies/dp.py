"""`dp`: data parallelism like `torch.nn.DataParallel`, which Lightning dropped in 2.0."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torchmetrics import Metric

from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.distributed.sharding.split_batch import cut, num_samples, shard_sizes
from lightning_mgpu.strategies.buffers import STATISTICS
from lightning_mgpu.strategies.loss import split_loss


class DataParallelStrategy(SingleDeviceStrategy):
    """One process and one set of parameters, copied to the other devices in every training step.

    Each device runs the step on its shard of the batch with a copy of the parameters. The copies
    are part of the autograd graph, so one backward pass of the mean loss accumulates all gradients
    on the first device, for a single optimizer. (In `manual_allreduce` every replica has its own.)
    Buffers, for example BatchNorm's running statistics, are kept from the first shard, and outputs
    other than the loss from the last. Evaluation runs on the first device. A batch with fewer
    samples than devices uses fewer devices.

    Args:
        device_shares: Share of a batch per device, for example `[0.7, 0.3]`. Default: equal.
        parallel_devices: Override the Trainer's devices. May repeat a device, or mix CPU and GPUs.
    """

    is_in_step = False

    def __init__(
        self, device_shares: list[float] | None = None, parallel_devices: list[str] | None = None
    ) -> None:
        super().__init__()
        self.device_shares = device_shares
        self.parallel_devices = [torch.device(device) for device in parallel_devices or ()]
        self.num_nodes, self._layer_sync, self.cluster_environment = 1, None, None

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        k = len(self.parallel_devices)
        reject(self.num_nodes * environment.world_size() > 1, "supports only one process: use ddp")
        reject(self._layer_sync is not None, "has no sync_batchnorm: use manual_allreduce or ddp")
        self.shares = self.device_shares or [1] * k
        is_wrong = len(self.shares) != k or min(self.shares) <= 0
        reject(is_wrong, f"got device_shares={self.device_shares}: must be {k} positive numbers")

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reject(self.is_in_step, "does not support all_gather in a step: shards run sequentially")
        return super().all_gather(tensor, *args, **kwargs)

    def training_step(self, batch: Any, *args: Any) -> Any:
        module: Any = self.lightning_module
        reject(not module.automatic_optimization, "does not support manual optimization: use ddp")
        num = num_samples(batch) if len(self.shares) > 1 else 1
        sizes, devices = shard_sizes(num, self.shares[:num]), self.parallel_devices[:num]
        # copy before the first shard runs, because its step may edit parameters or buffers
        copies = [{}, *(copy_tensors(module, device) for device in devices[1:])]
        outputs, states, results = [], set(), module.trainer._results
        is_first_batch = module.trainer.fit_loop.total_batch_idx == 0
        self.is_in_step = len(sizes) > 1
        for device, shard, tensors in zip(devices, cut(batch, sizes), copies):
            shard = move_data_to_device(shard, device)
            results.batch, results.batch_size = shard, None  # for the means of `self.log`
            with self.precision_plugin.train_step_context(), using(module, tensors, device):
                outputs.append(module.training_step(shard, *args))
                if is_first_batch:
                    named = [*module.named_parameters(), *module.named_buffers()]
                    kept = [t for n, t in named if not n.endswith(STATISTICS)]
                    states.add(checksum(kept))
        results.batch, results.batch_size = batch, None
        self.is_in_step = False
        edits = "edits of parameters or buffers that differ between shards"
        reject(len(states) > 1, f"loses {edits}: edit in `on_train_batch_end`, or use one device")
        return self._mean(outputs, sizes)

    def _mean(self, outputs: list[Any], sizes: list[int]) -> Any:
        """The output of the last shard, with the mean loss over all samples."""
        losses, weights = zip(*map(split_loss, outputs))
        has_weights = weights[0] is not None
        module: Any = self.lightning_module
        accumulates = module.trainer.accumulate_grad_batches > 1
        reject(None in losses, "needs a loss from every shard")
        kinds = {weight is None for weight in weights}
        reject(len(kinds) > 1, "needs a weight for the loss of every shard, or for none")
        reject(has_weights and accumulates, "does not support weights with accumulate_grad_batches")
        shares = weights if has_weights else sizes
        # a loss with weight 0 may be NaN: omit it
        terms = [loss.to(self.root_device) * w for loss, w in zip(losses, shares) if w]
        if not terms:  # all weights are 0: Lightning skips the optimizer step
            return None
        loss = sum(terms) / sum(shares)
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss


def copy_tensors(module: Any, device: torch.device) -> dict[str, Tensor]:
    """Copy parameters and buffers, except of metrics, which stay on the first device."""
    modules = module.named_modules()
    metrics = tuple(f"{n}." for n, layer in modules if isinstance(layer, Metric))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {n: t.to(device, copy=True) for n, t in named if not n.startswith(metrics)}


@contextmanager
def using(module: Any, tensors: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Run the module on a device, with these parameters and buffers."""
    with ExitStack() as stack:
        stack.enter_context(_reparametrize_module(module, tensors, tie_weights=True))
        replace(stack, module, "_device", device)
        for layer in module.modules():
            if isinstance(layer, Metric):
                replace(stack, layer, "update", partial(move_and_call, layer.update, layer.device))
            if isinstance(layer, nn.RNNBase):  # it has a second list of its parameters
                weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
                replace(stack, layer, "_flat_weights", weights)
        yield


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def move_and_call(function: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
    args, kwargs = move_data_to_device((args, kwargs), device)
    function(*args, **kwargs)


def reject(is_unsupported: bool, reason: str) -> None:
    if is_unsupported:
        raise MisconfigurationException(f"Strategy dp {reason}.")
