"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

README.md names the place of each function of the chapter; `__init__.py` has the way of a batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import LBFGS

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.routes.buckets import Gradients
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.shards.loader import shares_of_batch
from lightning_mgpu.shards.reader import Shards
from lightning_mgpu.strategies.buffers import write_buffers
from lightning_mgpu.strategies.loss import scale_gradient
from lightning_mgpu.strategies.sending import BUFFERS, GradientSender
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm
from lightning_mgpu.strategies.update import Update
from lightning_mgpu.tools import EXCHANGE

SEED = "seed of steps"  # of the fit that a checkpoint is of


class ManualAllreduceStrategy(GradientSender):
    """k replicas of the module, a process per device, equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one per replica, in each of them (see
            `lightning_mgpu.allreduce`). On the command line: its dotted path.
        replicas: k, a multiple of the number of processes. A process runs its replicas one after
            the other with one set of weights. The bits of the trained weights depend on k, and not
            on the number of devices of one kind. Left out: one per device.
        bucket_cap_mb: A bucket of gradients is full from this size on, and is sent as soon as all
            of them are there. With 0 they are sent together, after the backward pass. It changes no
            bits. Left out: 4 between CPUs of several machines, and 0 between GPUs. In one machine,
            CPUs have one bucket, in shared memory.
        parallel_devices, process_group_backend, timeout, start_method: As for DDPStrategy.

    Raises:
        ValueError: When `fit` begins, if `allreduce` does not compute the sum in place.
    """

    update: Update | None = None  # that has begun, and is not over
    shards: Sequence[Any] = ()  # the running batch of each replica here
    _seed = 0  # for what the steps of this fit draw
    _began: Tensor | None = None  # the state of torch's generator when it began

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        replicas: int | None = None,
        bucket_cap_mb: float | None = None,
        parallel_devices: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork"] = "popen",
    ) -> None:
        if not callable(allreduce):
            raise ValueError(f"{allreduce=}: needed is a function")
        if replicas is not None and replicas < 1:
            raise ValueError(f"{replicas=}: needed is a count of at least 1")
        if bucket_cap_mb is not None and not 0 <= bucket_cap_mb < math.inf:
            raise ValueError(f"{bucket_cap_mb=}: needed is a number of MB; 0 is one bucket")
        super().__init__(
            parallel_devices=[torch.device(each) for each in parallel_devices or ()] or None,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.allreduce, self.replicas = allreduce, replicas
        self.bucket_cap_mb = bucket_cap_mb

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.shards = batch.shards if isinstance(batch, Shards) else [batch]
        update = self._begin_update()
        user_step = super().training_step
        outputs = update.run_step(lambda shard: user_step(shard, *args, **kwargs), self.shards)
        if self.module.automatic_optimization:
            return update.make_loss(outputs)
        self.sync_buffers(update)  # there may be no backward pass after them
        return outputs[0]

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        update, weight = self._begin_update(), kwargs.pop("weight", None)  # of `manual_backward`
        if not self.module.automatic_optimization:
            [factor] = update.count_batch([weight])
            if factor != 1:
                closure_loss = scale_gradient(closure_loss, factor)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        run = self.precision_plugin.backward
        args = (closure_loss, self.module, optimizer, *args)
        update.run_backward(lambda: run(*args, **kwargs), self._starting_buckets)
        if not self._is_blocked:
            self.exchange_gradients(update.gradients, update.mean_shares)
            self.update = None
        return self.precision_plugin.post_backward(closure_loss, self.module)

    @torch.no_grad()
    def exchange_gradients(self, replicas: list[Gradients], shares: list[float]) -> None:
        """Leave the sum over all replicas in the `grad` of every parameter.

        Override it to change gradients before they are sent, after the pass; to send them in
        another way, override `route`.

        Args:
            replicas: The gradients of each of `local_replicas`, which may be edited: those of the
                window's batches, summed, times the share of its shard, and GradScaler's scale.
            shares: The mean of these shares, so that `replicas[i] / shares[i]` is the replica's
                own mean gradient.
        """
        if self.num_replicas > 1 or not self.sums_in_place:
            buffers = self.update.buffers if self.update else None
            replicas = [self.exchange_all(replicas, "gradients", buffers)]
        self.set_sums(replicas[0])

    def set_sums(self, sums: Gradients) -> None:
        """Make sums the gradients of parameters, beside those of earlier backward passes."""
        earlier = self.update.earlier if self.update else None
        for p in self.module.parameters():
            before, total = (earlier or {}).get(p), sums.get(p)
            p.grad = total if before is None else before if total is None else before + total

    def find_shares(self) -> list[float]:
        """The share of each replica here in the samples of the global batch."""
        return [1.0] if self.num_replicas == 1 else shares_of_batch(self.given, self.shards)

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        """The weights of all replicas' losses."""
        return self.meeting.gather(weights, "weights of losses")

    def _begin_update(self) -> Update:
        """The one that has begun in this epoch, or a new one."""
        is_of_before = self.update and self.update.epoch != self.module.trainer.current_epoch
        if is_of_before and self.module.automatic_optimization:
            self.sync_buffers()
            self.update = None
        if self.update is None:
            self.update = Update(self)
        return self.update

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super().setup(trainer)
        for k in {self.num_replicas, 3, 4}:  # with two, sums in any order are equal
            check_allreduce(self.allreduce, [self.root_device] * k)
        if self._layer_sync and not self.is_alone:
            if self.root_device.type == "cpu":
                self._layer_sync = CPUSyncBatchNorm()
            self.model = self._layer_sync.apply(self.module)
        super().setup(trainer)
        if not self.is_alone and any(isinstance(each, LBFGS) for each in self.optimizers):
            raise MisconfigurationException(
                "LBFGS decides by the loss, of which each process knows its part: take one process."
            )
        is_manual = not self.module.automatic_optimization
        is_own = is_overridden("backward", self.module)
        layers = [each for each in self.module.modules() if isinstance(each, nn.SyncBatchNorm)]
        plateaus = [each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
        by_step = any(each.interval == "step" for each in plateaus)
        if self.num_local > 1 and (self._layer_sync or layers or is_manual or is_own or by_step):
            raise MisconfigurationException(
                "sync_batchnorm, manual optimization, a module's own `backward` and a scheduler "
                "that follows a value in every step need one replica per process: leave out "
                "`replicas`."
            )
        # from torch's generator: two fits of a script draw other numbers, and a fit after the same
        # `seed_everything` the same
        self._began = torch.get_rng_state()
        self._seed = crc32(self._began.numpy().data)
        self.update = None
        # a module's own pass may edit gradients, and an override does
        own = ManualAllreduceStrategy.exchange_gradients
        self.set_up_courier(is_own or type(self).exchange_gradients is not own)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.module.trainer.fit_loop.total_batch_idx == 1:
            self.compare_weights()  # after the first batch, and later before each checkpoint

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint({**checkpoint, SEED: self._seed}, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if EXCHANGE in checkpoint and not hasattr(self, "exchange"):
            raise MisconfigurationException(
                "The checkpoint has the state of an exchange: take the strategy that saved it."
            )
        self._seed = checkpoint.get(SEED, self._seed)
        super().load_optimizer_state_dict(checkpoint)

    @contextmanager
    def random_numbers_of(self, i: int, purpose: str) -> Iterator[None]:
        """Random numbers by batch and replica: dropout draws the same in any process."""
        with isolate_rng(self.root_device.type == "cuda"):
            batch_idx = self.module.trainer.fit_loop.total_batch_idx + 1  # -1 at the first transfer
            seed_generators(self._seed, purpose, batch_idx, self.local_replicas[i])
            yield

    def draw_for_transfer(self, i: int) -> Any:
        is_apart = self.module.trainer.training and self.num_replicas > 1
        return self.random_numbers_of(i, "transfer") if is_apart else nullcontext()

    @contextmanager
    def log_as(self, shard: Any) -> Iterator[None]:
        """`self.log` weighs a mean by the samples of the batch that it finds in here."""
        results, batch = self.module.trainer._results, self.module.trainer._results.batch
        results.batch, results.batch_size = shard, None
        self.runs_one_of_several = self.num_local > 1
        try:
            yield
        finally:
            self.runs_one_of_several = False
            results.batch, results.batch_size = batch, None

    def sync_buffers(self, update: Update | None = None) -> None:
        """Set the buffers by those of all replicas, if a step may have made them differ."""
        update = update or self.update
        if update and update.buffers:
            self._start_buffers(update.buffers)
            self.meeting.gather(np.zeros(1, np.uint8), BUFFERS)
            rows = self._courier.finish()[BUFFERS]
            write_buffers(self.module, rows.view(self.num_replicas, -1))
            update.buffers = None

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.sync_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of a checkpoint: all processes ask for them, before anything else."""
        self.sync_buffers()
        return super().lightning_module_state_dict()

    def compare_weights(self) -> None:
        self.sync_buffers()
        super().compare_weights()

    def teardown(self) -> None:
        self.update, self.shards = None, ()
        super().teardown()
        if self._began is not None and torch.equal(torch.get_rng_state(), self._began):
            torch.rand(1)  # else the steps of a script's next fit would draw the same numbers
        self._began = None
