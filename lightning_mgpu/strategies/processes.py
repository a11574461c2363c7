"""A process per device, as under `ddp`, and what several need to train as one.

Launching, ranks and collectives are DDPStrategy's. There is no DDP wrapper.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _augment_message
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_mgpu.strategies.loaders import SlicedLoader
from lightning_mgpu.strategies.split_batch import shard_sizes
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm

DIFFER = "the processes do not run the same program"


class ProcessPerDeviceStrategy(DDPStrategy):
    """Processes with equal weights, of which each gets its part of every global batch."""

    replicas: int | None = None
    _host_group: Any = None
    _averaged: Sequence[Any] = ()  # logged values of an evaluation

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def num_replicas(self) -> int:
        """k: the global batch is cut into as many shards."""
        return self.replicas or self.world_size

    @property
    def num_local(self) -> int:
        return self.num_replicas // self.world_size

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def _configure_launcher(self) -> None:
        if not self.is_alone:  # one process needs no launcher and no process group
            super()._configure_launcher()

    def setup_environment(self) -> None:
        if self.num_replicas % self.world_size:
            raise MisconfigurationException(
                f"replicas={self.replicas} must be a multiple of the {self.world_size} processes."
            )
        environment: Any = self.cluster_environment
        group = dist.get_world_size() if dist.is_initialized() else 1
        if (running := max(group, environment.world_size())) != self.world_size:
            raise MisconfigurationException(
                f"This Trainer wants {self.world_size} of {running} processes, which would train "
                "apart: give all Trainers of a script as many devices as have been launched."
            )
        if self.is_alone:
            Strategy.setup_environment(self)
            self.set_world_ranks()
        else:
            with isolate_rng():  # it would seed the generators again
                super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        # `process_dataloader` gives each process its part
        trainer._accelerator_connector.use_distributed_sampler = False
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._host_group is None and not self.is_alone:
            self._host_group = dist.new_group(backend="gloo", timeout=self._timeout)
        if is_fitting and self._layer_sync and not self.is_alone:
            if self.root_device.type == "cpu":
                self._layer_sync = CPUSyncBatchNorm()
            self.model = self._layer_sync.apply(self.module)
        Strategy.setup(self, trainer)
        known = set(map(id, self.module.parameters()))
        used = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        if is_fitting and self.num_replicas > 1 and not known.issuperset(map(id, used)):
            raise MisconfigurationException(
                "An optimizer has a parameter that the module does not have: assign its layer to "
                "an attribute, or put it into a ModuleList."
            )

    def _setup_model(self, model: nn.Module) -> Any:
        """The first process's weights and buffers become those of all."""
        for tensor in () if self.is_alone else (*model.parameters(), *model.buffers()):
            row = tensor.detach().flatten().clone().view(torch.uint8)  # gloo has few dtypes
            dist.broadcast(row, 0)
            if not self.is_global_zero:
                tensor.data.copy_(row.view(tensor.dtype).view(tensor.shape))
        return model

    def start_gather(self, row: np.ndarray) -> Callable[[], np.ndarray]:
        """Exchange rows on the host. The function returned waits for them: (P, n) bytes."""
        sent = torch.from_numpy(np.ascontiguousarray(row).reshape(-1).view(np.uint8)).clone()
        rows = sent.repeat(self.world_size, 1)
        if self.is_alone:
            return lambda: rows.numpy()
        work: Any = dist.all_gather(list(rows), sent, self._host_group, async_op=True)
        return lambda: work.wait() and rows.numpy()

    def start_numbers(self, numbers: Any, names: Any = ()) -> Callable[[], np.ndarray]:
        """As `start_gather`, for numbers, (P, n). Raises if names or loaders' batches differ."""
        facts = zlib.crc32(repr([*names]).encode())
        for loader in self.module.trainer._active_loop._combined_loader.flattened:
            facts += getattr(loader, "order_checksum", 0)
        gathered = self.start_gather(np.array([facts, *numbers], np.float64))

        def wait() -> np.ndarray:
            rows = gathered().view(np.float64)
            for process in np.flatnonzero(rows[:, 0] != facts):
                raise RuntimeError(
                    f"{DIFFER}: process {process} has other batches, or logs other names, than "
                    f"{self.global_rank}. Seed all alike, and do not split a dataset by rank."
                )
            return rows[:, 1:]

        return wait

    def process_dataloader(self, dataloader: object) -> object:
        if self.is_alone or getattr(dataloader, "is_sliced", False):
            return dataloader
        _auto_add_worker_init_fn(dataloader, 0)  # workers seeded alike in all processes
        return SlicedLoader(dataloader, self)

    def part_of(self, n: int) -> list[int]:
        """The numbers of samples before, in and after this process's part of a batch of n."""
        k = self.num_replicas if self.module.trainer.training else self.world_size
        sizes, r = shard_sizes(n, [1] * k), k // self.world_size
        first = self.global_rank * r
        return [sum(sizes[:first]), sum(sizes[first : first + r]), sum(sizes[first + r :])]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Each number that the step logs becomes that of all samples."""
        if self.is_alone:
            return step(*args, **kwargs)
        for value in self._averaged:  # as it was logged: Lightning compares
            value.meta.sync.should = False
        output = step(*args, **kwargs)
        results = self.module.trainer._results or {}
        logged = [v for v in results.values() if v.is_tensor and "_step" in v.meta.fx]
        self._averaged = [value for value in logged if not value.meta.sync.should]
        for value in self._averaged:
            value.meta.sync.should = True
        self.start_numbers([], results)()
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's, with exact means of integers: Lightning's counts of samples."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.compare_weights()
        super().save_checkpoint(*args, **kwargs)

    def on_train_end(self) -> None:
        self.compare_weights()

    def compare_weights(self) -> None:
        """Raise a RuntimeError if processes hold other weights or buffers."""
        if self.is_alone:
            return
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        flat = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
        digests = np.array([zlib.crc32(v.numpy().data) for v in flat])
        digests = self.start_gather(digests)().view(np.int64)
        for process, i in np.argwhere(digests != digests[0]).tolist():
            raise RuntimeError(
                f"{DIFFER}: {[*tensors][i]} of process {process} is not that of process 0, by an "
                "edit that depends on the rank, or by a value logged without sync_dist=True."
            )

    def on_exception(self, exception: BaseException) -> None:
        pattern = "(?i).*(connection (closed|reset)|broken pipe|timed out waiting|timeout).*"
        _augment_message(exception, pattern, "another process has ended: see any message above")
