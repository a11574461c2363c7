"""A process per device, as under `ddp`, and what several need to train as one.

Launching, ranks and collectives are DDPStrategy's. There is no DDP wrapper.
"""

import os
import random
import signal
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import MethodType
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mgpu.processes.ends import (
    MAIN_PROCESS,
    end_with_main_process,
    handle_signals,
    host_group,
)
from lightning_mgpu.processes.evaluation import ExactLogging
from lightning_mgpu.processes.facts import MeetingStrategy
from lightning_mgpu.processes.meeting import Meeting
from lightning_mgpu.shards.generators import Generators
from lightning_mgpu.shards.loader import ShardLoader
from lightning_mgpu.shards.reader import Shards


class ProcessPerDeviceStrategy(MeetingStrategy):
    """Processes with equal weights, of which each gets its part of every global batch."""

    replicas: int | None = None
    given: Any = None  # the batch as the running loop has got it, with `Shards` in it
    kept: Generators | None = None  # of outside, where a step or an evaluation draws for itself
    runs_one_of_several = False  # replicas of this process: then none may wait for others

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
    def local_replicas(self) -> range:
        """The numbers of the replicas of this process, among all k."""
        first = self.global_rank * self.num_local
        return range(first, first + self.num_local)

    @property
    def is_child(self) -> bool:
        """Whether the first process has started this one, and not torchrun or SLURM."""
        return self.local_rank > 0 and isinstance(self.cluster_environment, LightningEnvironment)

    @property
    def is_one_machine(self) -> bool:
        """Whether several processes may have memory in common."""
        return self.num_nodes == 1 and not self.is_alone

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.numbers_of_passes = count()  # over loaders
        self._logging = ExactLogging()

    def _configure_launcher(self) -> None:
        if not self.is_alone:  # one process needs no launcher and no process group
            super()._configure_launcher()
            if not self.is_child:
                os.environ[MAIN_PROCESS] = str(os.getpid())

    def setup_environment(self) -> None:
        if self.num_replicas % self.world_size:
            raise MisconfigurationException(
                f"replicas={self.replicas} must be a multiple of the {self.world_size} processes."
            )
        running = dist.get_world_size() if dist.is_initialized() else super().world_size
        if running != self.world_size:
            raise MisconfigurationException(
                f"This Trainer wants {self.world_size} of {running} processes, which would train "
                "apart: give all Trainers of a script as many devices as have been launched."
            )
        # `process_dataloader` gives each process its part, also in a `setup` that asks for loaders
        self.module.trainer._accelerator_connector.use_distributed_sampler = False
        super().setup_environment()

    def setup_distributed(self) -> None:
        group = None
        if not self.is_alone:
            if self.is_child:
                end_with_main_process()
            with isolate_rng():  # Lightning seeds the generators again
                super().setup_distributed()
            group = host_group(dist.group.WORLD, self._timeout)
        seconds = self._timeout.total_seconds()  # type: ignore[union-attr]
        args = group, seconds, self.module.trainer
        self.meeting = Meeting(self.global_rank, self.world_size, *args)
        self.sync_generators()

    def setup(self, trainer: Trainer) -> None:
        handle_signals(trainer)
        self.kept = None  # an evaluation may have failed
        hook: Any = MethodType(_on_before_batch_transfer, self.module)
        self.module._on_before_batch_transfer = hook
        if self.is_one_machine:
            self.meeting.use_memory()
        Strategy.setup(self, trainer)
        used = {p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self.num_replicas > 1 and not used <= {*self.module.parameters()}:
            raise MisconfigurationException(
                "An optimizer has a parameter that the module does not have: assign its layer to "
                "an attribute, or put it into a ModuleList."
            )
        if self._start_method == "fork":  # Python seeds `random` again in a child
            random.seed(torch.initial_seed())
        self.sync_generators()

    def sync_generators(self) -> None:
        """What samplers and hooks draw from here on, they draw alike in all processes."""
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))

    def on_train_start(self) -> None:  # after those of the module and of callbacks
        self.sync_generators()

    def on_validation_start(self) -> None:
        """Processes draw other numbers in it: as many as they have samples to evaluate."""
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.kept = Generators(self.root_device.type == "cuda")

    def on_validation_end(self) -> None:
        if self.kept is not None:
            self.kept.put_back()
        self.kept = None

    def draw_for_loader(self) -> Any:
        """A context for what the loaders of a loop draw, which moves the generators of outside."""
        return nullcontext() if self.kept is None else self.kept.used()

    def _setup_model(self, model: nn.Module) -> Any:
        """The first process's weights and buffers become those of all."""
        for tensor in () if self.is_alone else (*model.parameters(), *model.buffers()):
            tensor.data.copy_(self.broadcast(tensor.data.cpu()))
        return model

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.meeting is not None:
            self.meeting.gather(np.zeros(1, np.uint8), "barrier")

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Takes the `Shards` of a loop's batch, and hands on what is in them.

        Hooks that move a batch are called for each shard. With several, the result has all.
        """
        found = find_shards(batch)
        if not found:  # another caller's, for example of `to_onnx`
            return super().batch_to_device(batch, device, dataloader_idx)
        self.given, self.given_shards, num_shards = batch, found, len(found[0].shards)
        moved = [self._move_shard(i, batch, device, dataloader_idx) for i in range(num_shards)]
        return moved[0] if num_shards == 1 else Shards(moved)

    def _move_shard(self, i: int, batch: Any, device: Any, dataloader_idx: int) -> Any:
        part = tree_map_only(Shards, lambda each: each.shards[i], batch)
        part = self.precision_plugin.convert_input(part)
        with self.draw_for_transfer(i):
            part = LightningModule._on_before_batch_transfer(self.module, part, dataloader_idx)
            return super().batch_to_device(part, device, dataloader_idx)

    def draw_for_transfer(self, i: int) -> Any:
        """A context for what the hooks that move shard i draw."""
        return nullcontext()

    def process_dataloader(self, dataloader: Any) -> Any:
        if isinstance(dataloader, ShardLoader):  # of an earlier fit, in a CombinedLoader
            dataloader = dataloader.loader
        _auto_add_worker_init_fn(dataloader, 0)  # workers seeded alike in all processes
        return ShardLoader(dataloader, self)

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
        results: Any = self.module.trainer._results
        self._logging.before_step(results, self.given_shards, args[0])
        output = step(*args, **kwargs)
        names = self._logging.after_step(results, self.given_shards)
        self.compare_facts("an evaluation's step", names=names)
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's, with exact means of integers: Lightning's counts of samples."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As DDPStrategy's, which would abort Python if the shapes differ."""
        if self.runs_one_of_several:
            raise MisconfigurationException("all_gather in a step: leave out `replicas`.")
        shape = crc32(repr((tensor.dtype, tensor.shape)).encode())
        if np.ptp(self.meeting.gather(np.array([shape]), "all_gather")):
            raise RuntimeError(
                f"all_gather of tensors of different shapes, here {tuple(tensor.shape)}: parts of "
                "a data set differ in size. Take a torchmetrics object, for example CatMetric."
            )
        return super().all_gather(tensor, *args, **kwargs)

    def teardown(self) -> None:
        if self.meeting is None and not self.is_alone:  # it has only started ("fork") the others
            self.launcher.kill(signal.SIGKILL)  # type: ignore[union-attr]
        self.barrier()  # the main process does not leave a worker that still works
        if self.is_child:
            end_with_main_process(False)
        if self.module is not None:
            vars(self.module).pop("_on_before_batch_transfer", None)
        self.given, self.given_shards = None, ()
        if self.meeting is not None:
            self.meeting.cells = None  # memory that a garbage collector would keep
        super().teardown()


def _on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int = 0) -> Any:
    """Lightning's, but for a loop's batch: `batch_to_device` calls the hook for each shard."""
    if find_shards(batch):
        return batch
    return LightningModule._on_before_batch_transfer(self, batch, dataloader_idx)


def find_shards(batch: Any) -> list[Any]:
    return [each for each in tree_leaves(batch) if isinstance(each, Shards)]
