"""A process per device, as under `ddp`, with what several processes need to train as one.

Launching, ranks, the process group, `barrier`, `broadcast` and `all_gather` are DDPStrategy's.
There is no DDP wrapper: the subclass in manual_allreduce.py exchanges the gradients.
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _augment_message
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu.strategies.loaders import SlicedLoader, random_states, set_random_states
from lightning_mgpu.strategies.meeting import ELSEWHERE, ENDED, Meeting, make_meeting
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessPerDeviceStrategy(DDPStrategy):
    """Processes with equal weights, of which each gets its shards of every global batch."""

    num_local: int
    """Replicas of this process."""

    def __init__(
        self,
        replicas: int | None,
        parallel_devices: list[str] | None,
        process_group_backend: str | None,
        timeout: timedelta,
        start_method: StartMethod,
    ) -> None:
        if replicas is not None and replicas < 1:
            raise ValueError(f"replicas={replicas}: at least one is needed.")
        super().__init__(
            parallel_devices=[torch.device(d) for d in parallel_devices or ()] or None,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.replicas, self.timeout = replicas, timeout
        self.meeting = Meeting()
        self.training_loaders: list[Any] = []
        self._averaged: list[Any] = []

    @property
    def num_world(self) -> int:
        """Processes on all machines together."""
        return self.num_nodes * self.num_processes

    @property
    def num_replicas(self) -> int:
        """k: the global batch is cut into as many shards."""
        return self.replicas or self.num_world

    @property
    def num_local(self) -> int:
        """Replicas of this process."""
        return self.num_replicas // self.num_world

    @property
    def first_replica(self) -> int:
        return self.global_rank * self.num_local

    @override
    def _configure_launcher(self) -> None:
        if self.num_world > 1:  # one process needs no launcher and no process group
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        if self.num_replicas % self.num_world:
            raise MisconfigurationException(
                f"replicas={self.replicas} on {self.num_world} processes: give a multiple of the "
                "number of processes, which all have as many replicas."
            )
        if self.num_world > 1:
            with isolate_rng():  # it would seed the generators again
                super().setup_environment()
        else:
            Strategy.setup_environment(self)
            self.set_world_ranks()
        group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not group == self.world_size == self.num_world:
            raise MisconfigurationException(
                f"This Trainer has {self.num_world} processes, but {max(group, self.world_size)} "
                "run: each would train on its own. Use the same number of devices in all Trainers "
                "of a script, and the number that the launcher has started."
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        # `process_dataloader` shares batches out; Lightning must not do it before
        trainer._accelerator_connector.use_distributed_sampler = False
        if is_fitting and self._layer_sync and self.num_world > 1:
            if self.root_device.type == "cpu":
                self._layer_sync = CPUSyncBatchNorm()
            self.model = self._layer_sync.apply(self.model)
        Strategy.setup(self, trainer)
        if not is_fitting:
            return
        self.training_loaders = []
        known = {id(p) for p in self.lightning_module.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if any(id(p) not in known for group in groups for p in group["params"]):
            raise MisconfigurationException(
                "An optimizer has a parameter that the module does not have: its gradient would "
                "not be exchanged. Make the layer an attribute, or put layers into a ModuleList."
            )

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The weights and buffers of the first process become those of all."""
        if self.num_world > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.data, 0)
        return model

    def meet(self, capacity: int) -> Meeting:
        """A new place where processes meet: rows of at most `capacity` bytes."""
        is_local = self.num_nodes == 1 and self.root_device.type == "cpu"
        local = self.broadcast if is_local else None
        return make_meeting(capacity, self.global_rank, self.num_world, self.timeout, local)

    def gather_numbers(self, numbers: Any) -> np.ndarray:
        """The numbers (n,) of every process, (P, n) in float64."""
        row = np.asarray(numbers, dtype=np.float64)
        return self.meeting.gather(row.view(np.uint8)).view(np.float64)

    # --- batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        is_training = self.lightning_module.trainer.training
        if not getattr(dataloader, "is_sliced", False) and self.num_world > 1:
            p, first, r = self.global_rank, self.first_replica, self.num_local
            dataloader = (
                SlicedLoader(
                    dataloader,
                    (first, first + r),
                    self.num_replicas,
                    check_size=self.check_num_samples,
                    before=lambda: set_random_states(self.broadcast(random_states())),
                )
                if is_training
                else SlicedLoader(
                    dataloader, (p, p + 1), self.num_world, self._check_logs, lambda: None
                )
            )
        if is_training:
            self.training_loaders.append(dataloader)
        return dataloader

    def order_checksum(self) -> float:
        """Differs between processes whose loaders have drawn other batches."""
        return float(sum(getattr(loader, "order_checksum", 0) for loader in self.training_loaders))

    def check_num_samples(self, n: int) -> None:
        """Refuse a training batch with fewer samples than replicas."""
        if n < self.num_replicas:
            raise ValueError(
                f"A training batch of {n} samples cannot be shared out to {self.num_replicas} "
                "replicas: use drop_last=True, another batch size, or fewer devices."
            )

    # --- logging

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the step logs becomes the mean over all samples, with or without `sync_dist`."""
        for value in self._averaged:  # as they were logged: Lightning compares
            value.meta.sync.should = False
        output = step(*args, **kwargs)
        logged = self.lightning_module.trainer._results.values() if self.num_world > 1 else ()
        self._averaged = [v for v in logged if v.is_tensor and not v.meta.sync.should]
        for value in self._averaged:
            value.meta.sync.should = True
        return output

    def _check_logs(self, n: int) -> None:
        """Refuse what would wait for a process that gets none of n samples."""
        values = self.lightning_module.trainer._results.values() if n < self.num_world else ()
        if any(value.meta.on_step and value.meta.sync.should for value in values):
            raise ValueError(
                f"A value is logged with on_step=True and sync_dist=True, but a batch of {n} "
                f"samples does not reach all of {self.num_world} processes: use on_step=False."
            )

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's; but a mean of integers, for example of numbers of samples, is exact."""
        is_count = isinstance(tensor, Tensor) and not tensor.dtype.is_floating_point
        if is_count and reduce_op in ("mean", "avg", None):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    # --- the end

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.compare_weights()
        super().save_checkpoint(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        self.compare_weights()

    def compare_weights(self) -> None:
        """Raise a RuntimeError if processes hold other weights."""
        if self.num_world == 1 or not self.lightning_module.trainer.training:
            return
        names, parameters = zip(*self.lightning_module.named_parameters())
        digests = self.gather_numbers([checksum(parameter) for parameter in parameters])
        if different := np.argwhere(digests != digests[0]).tolist():
            process, parameter = different[0]
            raise RuntimeError(
                f"{ELSEWHERE}: {names[parameter]} of process {process} differs from that of "
                "process 0. Commonest cause: an edit that depends on the rank, on random numbers "
                "of a hook, or on a training value logged without sync_dist=True."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.meeting.leave()
        pattern = r".*(Connection closed by peer|Connection reset by peer|Broken pipe).*"
        _augment_message(exception, pattern, ENDED)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.meeting, self.training_loaders, self._averaged = Meeting(), [], []


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy())
