"""A process per device, as under `ddp`, and what several need to train as one.

Launching, ranks and collectives are DDPStrategy's. There is no DDP wrapper.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_mgpu.processes.ends import (
    MAIN_PROCESS,
    end_with_main_process,
    handle_signals,
    host_group,
)
from lightning_mgpu.processes.meeting import Meeting
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.shards.loader import Pass, ShardLoader
from lightning_mgpu.shards.split_batch import num_samples

DIFFER = "the processes do not run the same program"
FACTS = {
    "seed": "draws other random numbers. Call seed_everything first, and draw as many everywhere",
    "batches": "has other batches. Seed all alike, and do not split a dataset by rank",
    "dataset": "has another dataset. Do not split it by rank, and seed what makes it",
    "parameters": "has other parameters that require a gradient, or in another layout",
    "names": "logs other values than {names}. Log the same ones in every batch",
    "since_last": "had other batches, learning rates or parameters that require a gradient since "
    "the last exchange of weights. Seed all alike, do not split a dataset by rank, and let "
    "schedulers act on what is logged with sync_dist=True",
}
"""Facts that the processes compare in every step, and the words for one that differs."""


class ProcessPerDeviceStrategy(DDPStrategy):
    """Processes with equal weights, of which each gets its part of every global batch."""

    replicas: int | None = None
    meeting: Any = None  # a `Meeting`, once all processes are there
    num_passes = 0  # over loaders
    _kept: dict[str, Any] | None = None  # states of generators, in a step or an evaluation
    is_in_step = False  # of one of several replicas
    _averaged: Sequence[Any] = ()  # logged values of an evaluation
    why_weights_differ = (
        "an edit that depends on the rank, a value logged without sync_dist=True, or "
        "`loss.backward()` in the place of `self.manual_backward(loss)`"
    )

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
    def local_replicas(self) -> range:
        """The numbers of the replicas of this process, among all k."""
        first = self.global_rank * self.num_local
        return range(first, first + self.num_local)

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, of one replica or of several."""
        return self.world_size == 1

    @property
    def starts_processes(self) -> bool:
        """Whether the first process starts the others, and not torchrun or SLURM."""
        return isinstance(self.cluster_environment, LightningEnvironment)

    @property
    def is_one_machine(self) -> bool:
        """Whether several processes may have memory in common."""
        return self.num_nodes == 1 and not self.is_alone

    def _configure_launcher(self) -> None:
        if self.is_alone:  # one process needs no launcher and no process group
            return
        super()._configure_launcher()
        if self.local_rank == 0 and self.starts_processes:
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
        super().setup_environment()

    def setup_distributed(self) -> None:
        group = None
        if not self.is_alone:
            if self.local_rank > 0 and self.starts_processes:
                end_with_main_process()
            # Lightning seeds the generators again, which only a forkserver's child needs
            is_seeded = self._start_method != "forkserver"
            with isolate_rng() if is_seeded else nullcontext():
                super().setup_distributed()
            group = host_group(dist.group.WORLD, self._timeout)
        place, timeout = (self.global_rank, self.world_size), self._timeout
        seconds = timeout.total_seconds() if timeout else 300.0
        self.meeting = Meeting(*place, group, seconds, self.module.trainer)

    def setup(self, trainer: Trainer) -> None:
        # `process_dataloader` gives each process its part
        trainer._accelerator_connector.use_distributed_sampler = False
        handle_signals(trainer)
        self._kept = None  # an evaluation may have failed
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
        self.share_generators()

    def share_generators(self) -> None:
        """What samplers and hooks draw from here on, they draw alike in all processes."""
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))

    def on_train_start(self) -> None:  # after those of the module and of callbacks
        self.share_generators()

    def on_validation_start(self) -> None:
        """Processes draw other numbers in it: as many as they have samples to evaluate."""
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.keep_generators()

    def on_validation_end(self) -> None:
        self.put_back_generators()

    def keep_generators(self) -> None:
        self._kept = _collect_rng_states(include_cuda=self.root_device.type == "cuda")

    def put_back_generators(self) -> None:
        if self._kept is not None:
            _set_rng_states(self._kept)
            self._kept = None

    @contextmanager
    def kept_generators(self) -> Iterator[None]:
        """For what loaders draw meanwhile: as on one device, they move the kept ones."""
        if self._kept is None:
            yield
            return
        with isolate_rng(include_cuda=False):
            _set_rng_states(self._kept)
            yield
            self._kept |= _collect_rng_states(include_cuda=False)

    def _setup_model(self, model: nn.Module) -> Any:
        """The first process's weights and buffers become those of all."""
        for tensor in () if self.is_alone else (*model.parameters(), *model.buffers()):
            tensor.data.copy_(self.broadcast(tensor.data.cpu()))
        return model

    def gather(self, row: np.ndarray, purpose: str) -> np.ndarray:
        """Rows (n,) of all processes, on the host: (P, n). The purpose is compared."""
        if self.meeting is None:
            return np.tile(row, (self.world_size, 1))
        return self.meeting.gather(row, purpose)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.gather(np.zeros(1, np.uint8), "barrier")

    def compare_facts(
        self,
        purpose: str,
        beside: Sequence[int] | np.ndarray = (),
        names: Sequence[str] = (),
        **own: int,
    ) -> np.ndarray:
        """A meeting that compares what processes must have alike: the `own` values are of FACTS.

        Returns the bytes `beside` the facts, of all processes: (P, n).

        Raises:
            RuntimeError: If processes differ in one of the facts.
        """
        facts = dict.fromkeys(FACTS, 0) | {"names": crc32(repr(names).encode())} | own
        for each in self.passes():
            for name, value in each.facts.items():
                facts[name] += value
        mine = np.array([*facts.values()])
        row = np.concatenate([mine.view(np.uint8), np.asarray(beside, np.uint8)])
        rows = self.gather(row, purpose)
        numbers = np.ascontiguousarray(rows[:, : mine.nbytes]).view(mine.dtype)
        for process, i in np.argwhere(numbers != mine).tolist():
            reason = [*FACTS.values()][i].format(names=names)
            raise RuntimeError(f"{DIFFER}: process {process}, not {self.global_rank}, {reason}.")
        return rows[:, mine.nbytes :]

    def passes(self) -> list[Pass]:
        """The passes over loaders that the running loop makes."""
        combined = self.module.trainer._active_loop._combined_loader
        running = [] if combined._iterator is None else combined._iterator.iterators
        return [each for each in running if isinstance(each, Pass)]

    def process_dataloader(self, dataloader: Any) -> Any:
        if isinstance(dataloader, ShardLoader):  # of an earlier fit, in a CombinedLoader
            dataloader = dataloader.loader
        _auto_add_worker_init_fn(dataloader, 0)  # workers seeded alike in all processes
        return ShardLoader(dataloader, self, trains=self.module.trainer.training)

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
        results: Any = self.module.trainer._results  # none in `predict`; empty before the first
        if results is not None and len(running := self.passes()) == 1:
            results.batch_size = self._count_samples(running[0], args[0])
        output = step(*args, **kwargs)
        named = {} if results is None else results
        logged = {n: v for n, v in named.items() if v.is_tensor and "_step" in v.meta.fx}
        synced = {n: v.meta.sync for n, v in logged.items() if not v.meta.sync.rank_zero_only}
        self._averaged = [logged[name] for name, sync in synced.items() if not sync.should]
        for value in self._averaged:
            value.meta.sync.should = True
        self.compare_facts("an evaluation's step", names=[*synced])
        return output

    def _count_samples(self, running: Pass, batch: Any) -> int | None:
        """The rows of an evaluation's batch; its indices, if its shape does not tell."""
        if running.has_rows:
            with suppress(ValueError):
                return num_samples(batch)
        fetcher: Any = self.module.trainer._active_loop._data_fetcher
        ahead = len(getattr(fetcher, "batches", ()))
        ahead += bool(running.read) and running.read[-1] is None  # there is no further batch
        keys = running.read[-1 - ahead] if len(running.read) > ahead else None
        return sum(map(len, keys.indices)) if keys else None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's, with exact means of integers: Lightning's counts of samples."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As DDPStrategy's, which would abort Python if the shapes differ."""
        if self.is_in_step:
            raise MisconfigurationException("all_gather in a step: leave out `replicas`.")
        shape = crc32(repr((tensor.dtype, tensor.shape)).encode())
        if np.ptp(self.gather(np.array([shape]), "all_gather")):
            raise RuntimeError(
                f"all_gather of tensors of different shapes, here {tuple(tensor.shape)}: parts of "
                "a data set differ in size. Take a torchmetrics object, for example CatMetric."
            )
        return super().all_gather(tensor, *args, **kwargs)

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
        digests = self.gather(np.array([*map(checksum, tensors.values())]), "weights")
        for process, i in np.argwhere(digests != digests[0]).tolist():
            raise RuntimeError(
                f"{DIFFER}: {[*tensors][i]} of process {process} is not that of process 0, by "
                f"{self.why_weights_differ}."
            )

    def teardown(self) -> None:
        if self.meeting is None and not self.is_alone:  # it has only started ("fork") the others
            self.launcher.kill(signal.SIGKILL)  # type: ignore[union-attr]
        self.barrier()  # the main process does not leave a worker that still works
        end_with_main_process(False)
        if self.meeting is not None:
            self.meeting.cells = None  # memory that a garbage collector would keep
        super().teardown()
