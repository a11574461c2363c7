"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

The book's functions, in the order of a step:

    get_params    replicas/get_params.py     copy the parameters to every device             `setup`
    split_batch   batch/shards.py            cut the minibatch into one shard a device       `batch_to_device`
    train_batch   train_batch.py             every device: loss and gradient of its shard    `training_step`, `backward`
    allreduce     ../allreduce/              sum the gradients, give the sum to every device `reduce_gradients`
                  optimizers/optimizers.py   every replica updates itself                    `update_replicas`

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=manual_allreduce
    python -m lightning_mgpu fit --trainer.strategy=ManualAllreduceStrategy \\
        --trainer.strategy.parallel_devices='[cpu, cpu, cpu]' --trainer.strategy.allreduce=my_module.my_allreduce
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.strategies.gradients.buckets import reduce_in_buckets
from lightning_mgpu.strategies.gradients.flat_gradients import FlatGradients
from lightning_mgpu.strategies.gradients.gradients import check_equal
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy


class ManualAllreduceStrategy(TrainBatchStrategy):
    """k replicas of the module on k devices of one process, kept equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one a device, in each of them (see `lightning_mgpu.allreduce`). A
            function of your own goes here, on the command line by its dotted path; it is tried on small tensors first.
        bucket_mb: Pack gradients into flat buckets of this many MB; 0 calls `allreduce` once a parameter, as the book.
        gradient_as_bucket_view: As in `DistributedDataParallel`: a device's gradients are views of one flat tensor,
            which `allreduce` gets whole, or in slices of `bucket_mb`; nothing is copied.
        parallel_devices: The devices, `["cuda:0", "cpu"]` say; one may stand there several times. Left out: those of
            `Trainer(accelerator, devices)`.
        split: Relative shares of the batch, one a device, or `auto`: in proportion to each device's speed, timed in the
            first steps. Left out: even ones.

    Raises:
        ValueError: If `allreduce` does not compute the sum in place, with what each device got instead.
        MisconfigurationException: If started as several processes (torchrun, SLURM).
    """

    name = "manual_allreduce"
    replicas_update = True

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        bucket_mb: float = 0.0,
        gradient_as_bucket_view: bool = False,
        parallel_devices: list[str] | None = None,
        split: list[float] | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(allreduce):
            raise ValueError(f"allreduce={allreduce}: give a function of a list of tensors, or leave it out.")
        if bucket_mb < 0:
            raise ValueError(f"bucket_mb={bucket_mb}: choose 0 (one call a parameter) or a size in MB.")
        super().__init__(parallel_devices, split, **kwargs)
        self.allreduce = allreduce
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._is_checked = False  # that this model's gradients are the same in all replicas

    @override
    def setup(self, trainer: Trainer) -> None:
        check_allreduce(self.allreduce, self.devices)
        self._is_checked = False
        super().setup(trainer)

    @override
    def _attach(self) -> None:
        super()._attach()
        if self.gradient_as_bucket_view and len(self.devices) > 1:
            self.gradients.flat = FlatGradients(self._replicas.parameters, self.bucket_bytes)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._is_checked &= batch_idx > 0  # once an epoch: it may have a state

    @override
    def reduce_gradients(self) -> None:
        """Leave the sum of the replicas' gradients in every one of them, by `allreduce`."""
        if len(self.devices) == 1:
            return
        to_pack = 0 if self.gradient_as_bucket_view else self.bucket_bytes
        self.gradients.reduce(partial(reduce_in_buckets, self.allreduce, bucket_bytes=to_pack))
        if not self._is_checked:
            allreduce = getattr(self.allreduce, "__qualname__", repr(self.allreduce))
            check_equal(self.gradients.parameters, f"allreduce {allreduce}")

    @override
    def exchange_gradients(self) -> None:
        """Call `reduce_gradients`; once an epoch check that it has left every replica with the same gradients.

        Raises:
            ValueError: If it has not: replicas would drift apart.
        """
        super().exchange_gradients()
        is_own = type(self).reduce_gradients is not ManualAllreduceStrategy.reduce_gradients
        if not self._is_checked and is_own and self.replicas_update:
            check_equal(self.gradients.parameters, f"{type(self).__name__}.reduce_gradients")
        self._is_checked = True

    @override
    def update_replicas(self, n: int) -> None:
        """Every other replica makes its own update, from its gradient."""
        assert self._own is not None
        can_repeat = self._num_closures <= 1 and not self.hooks.edit_in_step
        self._own.update(n, lambda: self._loss, can_repeat)
