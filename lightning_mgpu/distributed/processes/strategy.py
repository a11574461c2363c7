"""One process per device, launched like `ddp`, with sharded batches and consistency checks.

Launching, ranks and collectives are inherited from DDPStrategy. The module is not wrapped in DDP.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mgpu.distributed.processes.consistency import (
    DIVERGED,
    INVARIANTS,
    ConsistencyCheck,
    crc_of,
)
from lightning_mgpu.distributed.processes.control_plane import ControlPlane
from lightning_mgpu.distributed.processes.evaluation import ExactLogging
from lightning_mgpu.distributed.processes.failures import (
    MAIN_PROCESS,
    SHARES_CORES,
    PeerFailure,
    end_with_main_process,
    handle_signals,
    host_group,
)
from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.distributed.sharding.loader import ShardLoader
from lightning_mgpu.distributed.sharding.reader import Shard
from lightning_mgpu.distributed.sharding.rng_states import RNGStates


class ProcessPerDeviceStrategy(DDPStrategy):
    """Processes with identical weights train on their shards of every global batch.

    A replica is a process: `replicas=k` launches k processes, evenly distributed over the devices.
    """

    replicas: int | None = None  # None: one per device
    invariants = INVARIANTS
    why_weights_differ = (
        "an edit that depends on the rank, a value logged without sync_dist=True, or "
        "`loss.backward()` instead of `self.manual_backward(loss)`"
    )
    control: Any = None  # the `ControlPlane`, after `setup_distributed`
    loader_batch: Any = None  # the current batch as received by the loop, with `Shard` objects
    shards: Sequence[Any] = ()  # the `Shard` of each loader that is not exhausted
    outer_rng: RNGStates | None = None  # RNG states from before a validation
    _optimized: frozenset[Tensor] = frozenset()  # parameters of all optimizers

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    def world_size(self) -> int:
        """k, the number of processes, of replicas, and of shards of a global batch."""
        return self.num_nodes * self.num_processes

    num_replicas = world_size

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One device per local process: `devices`, each repeated for its replicas."""
        num = 1
        if self.devices and self.replicas:
            num = max(self.replicas // (self.num_nodes * len(self.devices)), 1)
        return self.devices and [device for device in self.devices for _ in range(num)]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self.devices = devices

    @property
    def is_child(self) -> bool:
        """Whether this process was launched by the first one, not by torchrun or SLURM."""
        return self.local_rank > 0 and isinstance(self.cluster_environment, LightningEnvironment)

    @property
    def is_one_machine(self) -> bool:
        """Whether there are several processes, all on one machine."""
        return self.num_nodes == 1 and not self.is_single_process

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.numbers_of_passes = count()  # one per pass over a loader
        self._logging = ExactLogging()

    def _configure_launcher(self) -> None:
        self._check_replicas()
        if self.is_single_process:
            return  # no launcher, no process group
        if "OMP_NUM_THREADS" not in os.environ or SHARES_CORES in os.environ:
            # Lightning divides a machine's cores by its local processes: the number of threads, and
            # with it the rounding of sums, would depend on the number of machines
            threads = _suggested_max_num_threads(self.world_size)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
        super()._configure_launcher()
        if not self.is_child:
            os.environ[MAIN_PROCESS] = str(os.getpid())

    def _check_replicas(self) -> None:
        k, environment = self.replicas, self.cluster_environment
        assert environment is not None
        is_launched = environment.creates_processes_externally
        if k and is_launched and not isinstance(environment, LightningEnvironment):
            num = environment.world_size()
            if num != k:
                option = f"--nproc-per-node={max(k // self.num_nodes, 1)}"
                raise MisconfigurationException(
                    f"replicas={k}, but {num} processes were launched: launch {k} ({option})."
                )
        if k and k != self.world_size:
            num = self.num_nodes * len(self.devices or ())
            raise MisconfigurationException(f"replicas={k} must be a multiple of {num} devices.")
        devices = self.parallel_devices or []
        if len({*devices}) < len(devices) and devices[0].type == "cuda":
            raise MisconfigurationException(
                f"{len(devices)} replicas on {len({*devices})} GPUs: NCCL supports one process per "
                "GPU. Use as many replicas as GPUs, or --trainer.accelerator=cpu."
            )

    def setup_environment(self) -> None:
        running = dist.get_world_size() if dist.is_initialized() else super().world_size
        if running != self.world_size:
            raise MisconfigurationException(
                f"This Trainer uses {self.world_size} processes, but {running} were launched: use "
                "the same number of devices for all Trainers of a script."
            )
        # `process_dataloader` shards batches, also if a `setup` hook requests the loaders
        self.module.trainer._accelerator_connector.use_distributed_sampler = False
        super().setup_environment()

    def setup_distributed(self) -> None:
        group = None
        if not self.is_single_process:
            if self.is_child:
                end_with_main_process()
            with isolate_rng():  # Lightning reseeds the RNGs
                self._join_processes()
            group = host_group(dist.group.WORLD, self._timeout)
        seconds = self._timeout.total_seconds()  # type: ignore[union-attr]
        args = group, seconds, self.module.trainer
        self.control = ControlPlane(self.global_rank, self.world_size, *args)
        self.consistency = ConsistencyCheck(self.global_rank, self.invariants)
        self.sync_generators()

    def _join_processes(self) -> None:
        try:
            super().setup_distributed()
        except dist.DistNetworkError as error:
            where = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
            raise PeerFailure(
                f"cannot connect to the process of rank 0 at {where}: has it exited, or is a "
                "variable of an earlier job still set?"
            ) from error

    def setup(self, trainer: Trainer) -> None:
        handle_signals(trainer)
        self.outer_rng = None  # an evaluation may have failed
        hook: Any = MethodType(_on_before_batch_transfer, self.module)
        self.module._on_before_batch_transfer = hook
        if self.is_one_machine:
            self.control.use_memory()
        Strategy.setup(self, trainer)
        self._optimized = frozenset()
        self.check_optimized_parameters()
        if self._start_method == "fork":  # Python reseeds `random` in a child
            random.seed(torch.initial_seed())
        self.sync_generators()

    def check_optimized_parameters(self) -> None:
        """Raise a MisconfigurationException if a parameter would be updated but not synchronized.

        Only new parameters are checked: a replaced layer stays in its optimizer.
        """
        groups = [group["params"] for opt in self.optimizers for group in opt.param_groups]
        optimized = frozenset(p for group in groups for p in group)
        if optimized == self._optimized or self.is_single_process:
            return
        before, self._optimized = self._optimized, optimized
        if not optimized - before <= {*self.module.parameters()}:
            raise MisconfigurationException(
                "An optimizer has a parameter that is not a parameter of the module: assign its "
                "layer to an attribute, or put it into a ModuleList."
            )

    def sync_generators(self) -> None:
        """Set the RNG states of all processes to those on rank 0."""
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))

    def on_train_start(self) -> None:  # runs after the hooks of module and callbacks
        self.sync_generators()

    def on_validation_start(self) -> None:
        """Save RNG states: processes evaluate different samples, so their RNGs would diverge."""
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.outer_rng = RNGStates(self.root_device.type == "cuda")

    def on_validation_end(self) -> None:
        if self.outer_rng is not None:
            self.outer_rng.restore()
        self.outer_rng = None

    def draw_for_loader(self) -> Any:
        """A context for a loop's loaders, which use and advance `outer_rng` if it is set."""
        return nullcontext() if self.outer_rng is None else self.outer_rng.swapped_in()

    def _setup_model(self, model: nn.Module) -> Any:
        """Broadcast the weights and buffers of rank 0, as DDP does."""
        tensors = () if self.is_single_process else (*model.parameters(), *model.buffers())
        for tensor in tensors:
            tensor.data.copy_(self.broadcast(tensor.data.cpu()))
        return model

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.control is not None:
            self.control.all_gather(np.zeros(1, np.uint8), "barrier")

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Unwrap each `Shard` of a loop's batch and move its contents to the device."""
        found = find_shards(batch)
        if not found:  # not a loop's batch, for example in `to_onnx`
            return super().batch_to_device(batch, device, dataloader_idx)
        self.loader_batch, self.shards = batch, found
        batch = tree_map_only(Shard, lambda shard: shard.batch, batch)
        batch = self.precision_plugin.convert_input(batch)
        with self.random_numbers("transfer"):
            batch = LightningModule._on_before_batch_transfer(self.module, batch, dataloader_idx)
            return super().batch_to_device(batch, device, dataloader_idx)

    def random_numbers(self, purpose: str) -> Any:
        """A context for random numbers of a step, or of the hooks that transfer a batch."""
        return nullcontext()

    def process_dataloader(self, dataloader: Any) -> Any:
        if isinstance(dataloader, ShardLoader):  # of an earlier fit, in a CombinedLoader
            dataloader = dataloader.loader
        _auto_add_worker_init_fn(dataloader, 0)  # seeds workers identically in all processes
        return ShardLoader(dataloader, self)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, and reduce the values that it logs over all samples."""
        if self.is_single_process:
            return step(*args, **kwargs)
        results: Any = self.module.trainer._results
        self._logging.before_step(results, self.shards, args[0])
        output = step(*args, **kwargs)
        names = self._logging.after_step(results, self.shards)
        row = self.consistency.pack({"names": crc_of(names), **self.batch_invariants()})
        self.consistency.verify(self.control.all_gather(row, "an evaluation's step"), names)
        return output

    def batch_invariants(self) -> dict[str, int]:
        """Invariants of the current batch, by name."""
        numbers = Counter[str]()
        for shard in self.shards:
            numbers.update(shard.invariants)
        return numbers

    def compare_weights(self) -> None:
        """Raise a RuntimeError if weights or buffers differ between processes."""
        if self.is_single_process:
            return
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        digests = self.control.all_gather(np.array([*map(checksum, tensors.values())]), "weights")
        for process, i in np.argwhere(digests != digests[0]).tolist():
            raise RuntimeError(
                f"{DIVERGED}: {[*tensors][i]} of process {process} differs from process 0. Common "
                f"causes: {self.why_weights_differ}."
            )

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.compare_weights()
        super().save_checkpoint(*args, **kwargs)

    def on_train_end(self) -> None:
        self.compare_weights()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Like DDPStrategy's, with exact means of integers, such as Lightning's sample counts."""
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Like DDPStrategy's, which would abort Python if shapes differ."""
        shape = crc_of((tensor.dtype, tensor.shape))
        if np.ptp(self.control.all_gather(np.array([shape]), "all_gather")):
            raise RuntimeError(
                f"all_gather of tensors of different shapes, {tuple(tensor.shape)} on this process:"
                " shards may differ in size. Use a torchmetrics object, for example CatMetric."
            )
        return super().all_gather(tensor, *args, **kwargs)

    def teardown(self) -> None:
        if self.control is None and not self.is_single_process:
            # this process has only launched ("fork") the others
            self.launcher.kill(signal.SIGKILL)  # type: ignore[union-attr]
        self.barrier()  # the main process waits for its workers
        if self.is_child:
            end_with_main_process(False)
        if self.module is not None:
            vars(self.module).pop("_on_before_batch_transfer", None)
        self.loader_batch, self.shards = None, ()
        if self.control is not None:
            self.control.cells = None  # release memory that reference cycles would keep alive
        super().teardown()


def _on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int = 0) -> Any:
    """Lightning's, except for a loop's batch: `batch_to_device` calls the hook then."""
    if find_shards(batch):
        return batch
    return LightningModule._on_before_batch_transfer(self, batch, dataloader_idx)


def find_shards(batch: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Shard)]
