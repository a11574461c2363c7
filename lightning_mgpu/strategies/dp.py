"""`dp`: `torch.nn.DataParallel`'s way, which the Lightning Trainer dropped in 2.0."""

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
    """One process and one set of parameters, copied to the other devices for every training step.

    Each device runs the step on its shard of the batch, with copies of the parameters. Autograd
    knows the copies, so the backward pass of the mean loss adds all gradients up on the first
    device, where one optimizer makes the update. In `manual_allreduce` every replica updates
    itself. The first shard's buffers are kept, for example BatchNorm's running statistics. Outputs
    other than the loss are those of the last shard. Evaluation runs on the first device. A batch
    of fewer samples than devices takes fewer devices.

    Args:
        device_shares: The devices' shares of a batch, for example `[0.7, 0.3]`. Default: equal.
        parallel_devices: Instead of the Trainer's. A device may occur twice, or a CPU beside GPUs.
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
        refuse(self.num_nodes * environment.world_size() > 1, "runs as one process: use ddp")
        refuse(self._layer_sync is not None, "has no sync_batchnorm: use manual_allreduce or ddp")
        self.shares = self.device_shares or [1] * k
        is_wrong = len(self.shares) != k or min(self.shares) <= 0
        refuse(is_wrong, f"needs {k} device_shares > 0, not {self.device_shares}")

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse(self.is_in_step, "has no all_gather inside a step, where shards run one by one")
        return super().all_gather(tensor, *args, **kwargs)

    def training_step(self, batch: Any, *args: Any) -> Any:
        module: Any = self.lightning_module
        refuse(not module.automatic_optimization, "has no manual optimization: use ddp")
        num = num_samples(batch) if len(self.shares) > 1 else 1
        sizes, devices = shard_sizes(num, self.shares[:num]), self.parallel_devices[:num]
        # all copies are made before the first shard runs, which may edit what is copied
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
        differs = "edits that differ between shards, of parameters or buffers: use one device"
        refuse(len(states) > 1, f"loses {differs}, or edit in `on_train_batch_end`")
        return self._mean(outputs, sizes)

    def _mean(self, outputs: list[Any], sizes: list[int]) -> Any:
        """The last output, with the mean loss over all samples."""
        losses, weights = zip(*map(split_loss, outputs))
        has_weights = weights[0] is not None
        module: Any = self.lightning_module
        accumulates = module.trainer.accumulate_grad_batches > 1
        refuse(None in losses, "needs a loss of every shard")
        kinds = {weight is None for weight in weights}
        refuse(len(kinds) > 1, "needs weights of all or none")
        refuse(has_weights and accumulates, "takes no weights where gradients are accumulated")
        shares = weights if has_weights else sizes
        # a loss with weight 0 may be NaN: it does not count
        terms = [loss.to(self.root_device) * w for loss, w in zip(losses, shares) if w]
        if not terms:  # nothing counts: Lightning leaves the update out
            return None
        loss = sum(terms) / sum(shares)
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss


def copy_tensors(module: Any, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers, without those of metrics, which stay on the first device."""
    modules = module.named_modules()
    metrics = tuple(f"{n}." for n, each in modules if isinstance(each, Metric))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {n: t.to(device, copy=True) for n, t in named if not n.startswith(metrics)}


@contextmanager
def using(module: Any, tensors: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Let a module compute on another device, with other parameters and buffers."""
    with ExitStack() as stack:
        stack.enter_context(_reparametrize_module(module, tensors, tie_weights=True))
        replace(stack, module, "_device", device)
        for each in module.modules():
            if isinstance(each, Metric):
                replace(stack, each, "update", partial(move_and_call, each.update, each.device))
            if isinstance(each, nn.RNNBase):  # it has a second list of its parameters
                weights = [getattr(each, name, None) for name in each._flat_weights_names]
                replace(stack, each, "_flat_weights", weights)
        yield


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def move_and_call(function: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
    args, kwargs = move_data_to_device((args, kwargs), device)
    function(*args, **kwargs)


def refuse(is_asked_for: bool, reason: str) -> None:
    if is_asked_for:
        raise MisconfigurationException(f"Strategy dp {reason}.")
