"""A process per device, as under `ddp`, and what several need to train as one.

Launching, ranks, the process group, `barrier`, `broadcast` and `all_gather` are DDPStrategy's.
There is no DDP wrapper: manual_allreduce.py exchanges the gradients.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

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

from lightning_mgpu.strategies.loaders import SlicedLoader, get_random_states, set_random_states
from lightning_mgpu.strategies.meeting import DIFFER, ENDED, Meeting, make_meeting, share_memory
from lightning_mgpu.strategies.split_batch import shard_sizes
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm


class ProcessPerDeviceStrategy(DDPStrategy):
    """Processes with equal weights, of which each gets its part of every global batch."""

    replicas: int | None = None
    meeting = Meeting()

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    @override
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def num_replicas(self) -> int:
        """k: the global batch is cut into as many shards."""
        return self.replicas or self.world_size

    @property
    def num_local(self) -> int:
        """Replicas of this process."""
        return self.num_replicas // self.world_size

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @override
    def _configure_launcher(self) -> None:
        if not self.is_alone:  # one process needs no launcher and no process group
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        if self.num_replicas % self.world_size:
            raise MisconfigurationException(
                f"replicas={self.replicas} for {self.world_size} processes: give a multiple, "
                "because all processes have as many."
            )
        if self.is_alone:
            Strategy.setup_environment(self)
            self.set_world_ranks()
        else:
            with isolate_rng():  # it would seed the generators again
                super().setup_environment()
        environment: Any = self.cluster_environment
        group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        running = max(group, environment.world_size())
        if running != self.world_size:
            raise MisconfigurationException(
                f"This Trainer wants {self.world_size} of {running} processes, which would train "
                "apart: give all Trainers of a script as many devices as have been launched."
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        # `process_dataloader` gives each process its part
        trainer._accelerator_connector.use_distributed_sampler = False
        self.training_loaders: list[Any] = []
        self.averaged: list[Any] = []  # logged values of the running evaluation
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync and not self.is_alone:
            if self.root_device.type == "cpu":
                self._layer_sync = CPUSyncBatchNorm()
            self.model = self._layer_sync.apply(self.module)
        Strategy.setup(self, trainer)
        known = set(map(id, self.module.parameters()))
        used = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        if is_fitting and self.num_replicas > 1 and not known.issuperset(map(id, used)):
            raise MisconfigurationException(
                "An optimizer has a parameter that the module does not have: its gradient would "
                "not be exchanged. Assign the layer to an attribute, or put it into a ModuleList."
            )

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        """The first process's weights and buffers become those of all."""
        for tensor in () if self.is_alone else (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
        return model

    def share(self, size: int) -> Tensor | None:
        """Memory of `size` bytes for all processes; None if they are not CPU processes of one
        machine, or if there is no room."""
        if self.num_nodes > 1 or self.root_device.type != "cpu":
            return None
        return share_memory(size, self.is_global_zero, self.broadcast)

    def meet(self, capacity: int) -> None:
        """Make the place where processes exchange rows of at most `capacity` bytes."""
        if not self.is_alone:
            timeout: Any = self._timeout
            where = self.global_rank, self.world_size, timeout
            self.meeting = make_meeting(capacity, *where, self.share)

    def gather_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """(P, n): the numbers of every process."""
        return self.meeting.gather(np.array(numbers, np.float64).view(np.uint8)).view(np.float64)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        is_training = self.module.trainer.training
        if not self.is_alone and not getattr(dataloader, "is_sliced", False):
            part, begin = self._part_of_evaluation, lambda: None
            if is_training:  # samplers draw what they would draw on one device
                part = self._part_of_training
                begin = lambda: set_random_states(self.broadcast(get_random_states()))  # noqa: E731
            dataloader = SlicedLoader(dataloader, part, begin)
        if is_training:
            self.training_loaders.append(dataloader)
        return dataloader

    def _part_of_training(self, n: int) -> list[int]:
        if n < self.num_replicas:
            raise ValueError(
                f"A training batch of {n} samples cannot be shared out to {self.num_replicas} "
                "replicas: use drop_last=True, another batch size, or fewer devices."
            )
        sizes, r = shard_sizes(n, [1] * self.num_replicas), self.num_local
        first = self.global_rank * r
        return [sum(sizes[:first]), sum(sizes[first : first + r]), sum(sizes[first + r :])]

    def _part_of_evaluation(self, n: int) -> list[int]:
        logged = self.module.trainer._results or {}
        waits = [v for v in logged.values() if v.meta.on_step and v.meta.sync.should]
        if n < self.world_size and any(all(v is not a for a in self.averaged) for v in waits):
            raise ValueError(
                f"self.log(..., on_step=True, sync_dist=True) waits for all {self.world_size} "
                f"processes, but a batch has only {n} samples: use on_step=False."
            )
        sizes, p = shard_sizes(n, [1] * self.world_size), self.global_rank
        return [sum(sizes[:p]), sizes[p], sum(sizes[p + 1 :])]

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the step logs becomes the mean over all samples, with or without `sync_dist`."""
        for value in self.averaged:  # as it was logged: Lightning compares
            value.meta.sync.should = False
        output = step(*args, **kwargs)
        logged = () if self.is_alone else self.module.trainer._results.values()
        self.averaged = [v for v in logged if v.is_tensor and not v.meta.sync.should]
        for value in self.averaged:
            value.meta.sync.should = True
        return output

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's, with exact means of integers: Lightning's counts of samples."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.compare_weights()
        super().save_checkpoint(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        self.compare_weights()

    def compare_weights(self) -> None:
        """Raise a RuntimeError if processes hold other weights."""
        if self.is_alone:
            return
        names, parameters = zip(*self.module.named_parameters())
        digests = self.gather_numbers([checksum(parameter) for parameter in parameters])
        for process, parameter in np.argwhere(digests != digests[0]).tolist():
            raise RuntimeError(
                f"{DIFFER}: {names[parameter]} of process {process} is not that of process 0. The "
                "commonest causes: an edit that depends on the rank or on a hook's random numbers, "
                "or a training value that was logged without sync_dist=True."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.meeting.leave()
        pattern = ".*(Connection closed by peer|Connection reset by peer|Broken pipe).*"
        _augment_message(exception, pattern, ENDED)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.meeting = Meeting()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
