"""The book's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

`__init__.py` follows a batch through the functions of this strategy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import check_allreduce, counts_to_check, textbook_allreduce
from lightning_mgpu.allreduce.plan import Plan
from lightning_mgpu.allreduce.record import record
from lightning_mgpu.distributed.comm.as_written import WrittenBucket
from lightning_mgpu.distributed.comm.buckets import Bucket, Gradients
from lightning_mgpu.distributed.comm.schedules import MessageSchedule, sum_gathered
from lightning_mgpu.distributed.processes import ProcessPerDeviceStrategy
from lightning_mgpu.distributed.processes.consistency import crc_of
from lightning_mgpu.distributed.sharding.loader import share_of_batch
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.strategies.gradient_sync import GradientSync
from lightning_mgpu.strategies.loss import scale_gradient
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm
from lightning_mgpu.strategies.window import AccumulationWindow
from lightning_mgpu.tools import EXCHANGE

BUCKET_CAP_MB = 4.0  # between CPUs of several machines
SEED = "seed of steps"  # key of a checkpoint


class ManualAllreduceStrategy(ProcessPerDeviceStrategy):
    """Data parallelism with one process per replica and an allreduce written in Python.

    Args:
        allreduce: Overwrites each of k tensors, one per replica, with their sum (see
            `lightning_mgpu.allreduce`). On the command line: its dotted path.
        as_written: Send the messages that the allreduce describes, for example around a ring: each
            process runs it on its own gradients. Otherwise gradients are gathered and the function
            is called in one place, which sends the fewest bytes. The sums are bitwise identical.
            See `lightning_mgpu.allreduce.record`.
        replicas: Number k of virtual replicas, a multiple of the number of devices. Several
            processes may share a CPU. Bitwise results depend on k, but not on the number of
            devices of the same kind. Default: one per device.
        bucket_cap_mb: Bucket size in MB, as in DDP, with a smaller first bucket. Buckets are sent
            during the backward pass; 0 sends everything after it. Does not affect results.
            Default: 4 between CPUs of several machines, 0 between GPUs. CPUs of one machine use a
            single bucket in shared memory.
        parallel_devices, process_group_backend, timeout, start_method: As for DDPStrategy.

    Raises:
        ValueError: At the start of `fit`, if `allreduce` does not compute the sum in place.
    """

    uses_shared_memory = True  # on one machine; an override that sends messages sets it to False
    sync: Any = None  # the `GradientSync` of a fit
    window: AccumulationWindow | None = None  # None between optimizer steps
    batch: Any = None  # of the current step
    has_run = False  # whether a step has run since buffers were synchronized
    _written: Mapping[Bucket, WrittenBucket] = MappingProxyType({})
    _is_blocked = False  # True in all batches of a window but the last
    _seed = 0  # of random numbers drawn in the steps of this fit
    _began: Tensor | None = None  # torch's RNG state at the start of the fit

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        as_written: bool = False,
        replicas: int | None = None,
        bucket_cap_mb: float | None = None,
        parallel_devices: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork"] = "popen",
    ) -> None:
        if not callable(allreduce):
            raise ValueError(f"{allreduce=}: must be a callable")
        if replicas is not None and replicas < 1:
            raise ValueError(f"{replicas=}: must be a positive integer")
        if bucket_cap_mb is not None and not 0 <= bucket_cap_mb < math.inf:
            raise ValueError(f"{bucket_cap_mb=}: must be a number of MB, 0 or more")
        super().__init__(
            parallel_devices=[torch.device(name) for name in parallel_devices or ()] or None,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.allreduce, self.as_written, self.replicas = allreduce, as_written, replicas
        self.bucket_cap_mb = bucket_cap_mb

    @property
    def description(self) -> str:
        """How gradients are summed, for the header of a run."""
        how = ", as written" if self.as_written else " on gathered gradients"
        return name_of(self.allreduce) + how

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        window, self.batch = self._begin_window(), batch
        with self.random_numbers("step"):
            output = super().training_step(batch, *args, **kwargs)
        self.has_run = True
        if not self.module.automatic_optimization:
            self.sync_buffers()  # a backward pass need not follow
            return output
        output = window.make_loss(output)
        callbacks = vars(self.module.trainer)["callbacks"]
        if any(isinstance(callback, _LRCallback) for callback in callbacks) and self.world_size > 1:
            return self._set_mean_loss(output, window.factor)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        window, weight = self._begin_window(), kwargs.pop("weight", None)  # of `manual_backward`
        if not self.module.automatic_optimization:
            closure_loss = scale_gradient(closure_loss, window.weigh_batch(weight))
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        run = self.precision_plugin.backward
        args = (closure_loss, self.module, optimizer, *args)
        is_last = not self._is_blocked and not self.module.trainer.interrupted
        with self.sync.during_backward() if is_last else nullcontext():
            window.run_backward(lambda: run(*args, **kwargs), self._is_blocked)
        if not self._is_blocked:
            self.exchange_gradients(window.gradients, window.mean_share)
            self.window = None
        return self.precision_plugin.post_backward(closure_loss, self.module)

    @torch.no_grad()
    def exchange_gradients(self, gradients: Gradients, share: float) -> None:
        """Set the `grad` of every parameter to the sum over all replicas.

        Override it to change gradients after the backward pass, before they are sent. To send them
        in a different way, override `sync_bucket`.

        Args:
            gradients: Local gradients, which may be edited: summed over the batches of the window,
                and multiplied by the shard's share and by GradScaler's scale.
            share: The mean share: `gradients / share` is the local mean gradient.
        """
        has_run, self.has_run = self.has_run, False
        invariants = self.batch_invariants()
        self.set_sums(self.sum_over_replicas(gradients, "gradients", invariants, has_run))

    def sum_over_replicas(
        self, gradients: Gradients, purpose: str, invariants: dict[str, int], buffers: bool
    ) -> Gradients:
        """Sum gradients over all replicas: see `GradientSync.reduce`."""
        if self.is_single_process and self.uses_shared_memory:
            return gradients
        return self.sync.reduce(gradients, purpose, invariants, buffers)

    def sync_bucket(self, bucket: Bucket, gradients: Gradients) -> MessageSchedule:
        """Return the message schedule that sums a bucket (cf. DDP's communication hooks).

        Args:
            bucket: Its row contains a copy of the local gradients.
            gradients: Local gradients of all parameters whose gradients are ready.
        """
        if self.as_written:
            return self._written[bucket].schedule()
        return sum_gathered(bucket, self.allreduce, self.global_rank)

    def prepare_buckets(self, buckets: Sequence[Bucket]) -> int:
        """Record plans for new buckets if the allreduce runs as written; returns their checksum."""
        plans = dict[Any, Plan]()  # by shape, strides and dtype

        def make_plan(X: Tensor) -> Plan:
            key = X.shape, X.stride(), X.dtype
            if key not in plans:
                plans[key] = record(self.allreduce, self.world_size, X)
            return plans[key]

        if self.as_written and not self.is_single_process:
            rank = self.global_rank
            self._written = {bucket: WrittenBucket(bucket, make_plan, rank) for bucket in buckets}
        return crc_of([plan.digest() for plan in plans.values()])

    def set_sums(self, sums: Gradients) -> None:
        """Add the sums to the gradients that parameters had before the window."""
        earlier = (self.window and self.window.earlier) or {}
        memories = Counter(before.data_ptr() for before in earlier.values())
        for p in self.module.parameters():
            before, total = earlier.get(p), sums.get(p)
            if before is None or total is None:
                p.grad = total if before is None else before
            elif before.requires_grad or memories[before.data_ptr()] > 1:
                p.grad = before + total
            else:  # in place, as autograd does: it may be a view of an optimizer's flat gradient
                p.grad = before.add_(total)

    def _set_mean_loss(self, output: Any, factor: float) -> Any:
        """Set the loss to its mean over all replicas, which LearningRateFinder reads."""
        loss = output["loss"] if isinstance(output, Mapping) else output
        row = np.array([loss.item(), factor])
        rows = self.control.all_gather(row, "losses").reshape(-1, 2).tolist()
        total = sum(factor for _, factor in rows)
        loss = loss.clone()  # keeps the local gradient
        # a loss of weight 0 may be NaN
        loss.data.fill_(sum(value * (factor / total) for value, factor in rows if factor))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def compute_share(self) -> float:
        """This replica's share of the samples in the global batch."""
        return 1.0 if self.is_single_process else share_of_batch(self.loader_batch, self.batch)

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        """All-gather the weights of the replicas' losses."""
        return self.control.all_gather(weights, "weights of losses")

    def _begin_window(self) -> AccumulationWindow:
        """Return the current window of this epoch, or begin a new one."""
        is_of_before = self.window and self.window.epoch != self.module.trainer.current_epoch
        if is_of_before and self.module.automatic_optimization:
            self.sync_buffers()
            self.window = None
        if self.window is None:
            self.check_optimized_parameters()
            needs_all = self._layer_sync is not None
            args = self.compute_share, self.gather_weights, needs_all
            self.window = AccumulationWindow(self.module, *args)
        return self.window

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Entered by Lightning for all batches of a window but the last, like DDP's `no_sync`."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = False

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super().setup(trainer)
        for k in counts_to_check(self.allreduce, self.world_size):
            check_allreduce(self.allreduce, [self.root_device] * k, self.as_written)
        is_on_cpu = self.root_device.type == "cpu"
        if self._layer_sync and not self.is_single_process:
            self._layer_sync = CPUSyncBatchNorm() if is_on_cpu else self._layer_sync
            self.model = self._layer_sync.apply(self.module)
        super().setup(trainer)
        if not self.is_single_process and any(isinstance(opt, LBFGS) for opt in self.optimizers):
            raise MisconfigurationException(
                "LBFGS is not supported with several replicas: it reads the loss, but each process "
                "computes only the loss of its shard. Use one device."
            )
        # from torch's RNG: successive fits of a script draw different random numbers, and fits
        # after the same `seed_everything` draw the same
        self._began = torch.get_rng_state()
        self._seed = crc32(self._began.numpy().data)
        self.window, self._is_blocked, self.has_run = None, False, False
        # a custom `backward` may edit gradients before they are sent, and so may an override
        base = ManualAllreduceStrategy.exchange_gradients
        edits = is_overridden("backward", self.module) or type(self).exchange_gradients is not base
        # only one NCCL group may have collectives in flight; torch's SyncBatchNorm uses another
        one_group = self._layer_sync is None or is_on_cpu
        default = BUCKET_CAP_MB if is_on_cpu else 0
        shares_memory = self.uses_shared_memory and not self.as_written
        self.sync = GradientSync(
            self.module,
            self.control,
            self.consistency,
            self.sync_bucket,
            self.prepare_buckets,
            is_elementwise=getattr(self.allreduce, "elementwise", False),
            cap=1e6 * (default if self.bucket_cap_mb is None else self.bucket_cap_mb),
            in_memory=shares_memory and is_on_cpu and bool(self.control.cells),
            device=self.root_device,
            overlaps=not edits and one_group,
        )
        if self.as_written:  # recording may raise an error: do it before training
            self.sync.prepare()
            self.sync.layout = {}  # hooks may freeze parameters before the first step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.module.trainer.fit_loop.total_batch_idx == 1:
            self.compare_weights()  # after the first batch; later, before each checkpoint

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint({**checkpoint, SEED: self._seed}, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if EXCHANGE in checkpoint and not hasattr(self, "exchange"):
            raise MisconfigurationException(
                "The checkpoint contains the state of an exchange: use the strategy that saved it."
            )
        self._seed = checkpoint.get(SEED, self._seed)
        super().load_optimizer_state_dict(checkpoint)

    @contextmanager
    def random_numbers(self, purpose: str) -> Iterator[None]:
        """A context with RNGs seeded per batch and replica, for example for dropout."""
        if self.is_single_process or not self.module.trainer.training:
            yield
            return
        with isolate_rng(self.root_device.type == "cuda"):
            batch_idx = self.module.trainer.fit_loop.total_batch_idx + 1  # -1 at the first transfer
            seed_generators(self._seed, purpose, batch_idx, self.global_rank)
            yield

    def sync_buffers(self) -> None:
        """Synchronize buffers over all replicas if a step may have changed them."""
        if self.has_run and not self.module.trainer.interrupted:
            self.sync.sync_buffers()
            self.has_run = False

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.sync_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of a checkpoint, with synchronized buffers: all processes call this."""
        self.sync_buffers()
        return super().lightning_module_state_dict()

    def compare_weights(self) -> None:
        self.sync_buffers()
        super().compare_weights()

    def teardown(self) -> None:
        if self.sync is not None:
            self.sync.close(self.module.trainer.interrupted)
        # release memory that reference cycles would keep alive
        self.sync, self.window, self.batch, self._written = None, None, None, {}
        self.has_run = False
        super().teardown()
        if self._began is not None and torch.equal(torch.get_rng_state(), self._began):
            torch.rand(1)  # else the script's next fit would draw the same random numbers
        self._began = None


def name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of functools.partial
    return getattr(function, "__name__", type(function).__name__)
