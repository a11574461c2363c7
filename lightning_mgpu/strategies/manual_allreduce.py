"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

The minibatch is split over the devices. Every replica computes the gradient of its shard. The
allreduce leaves the sum in each of them. Every replica updates itself.

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=manual_allreduce
    python -m lightning_mgpu fit --trainer.strategy=manual_allreduce \\
        --trainer.strategy.parallel_devices='[cpu, cpu, cpu]' \\
        --trainer.strategy.allreduce=my_module.my_allreduce
"""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.allreduce import allreduce_many, check_allreduce, textbook_allreduce
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy


class ManualAllreduceStrategy(TrainBatchStrategy):
    """k replicas of the module, in one process or in several, equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one per replica, in each of them (see
            `lightning_mgpu.allreduce`). A function of your own goes here, on the command line by
            its dotted path; it is tried on small tensors first.
        parallel_devices: The devices, for example `["cuda:0", "cpu"]`; one may stand there several
            times. Left out: those of `Trainer(accelerator, devices)`.
        split: Shares of the batch, one per device, or `auto`: in proportion to each device's speed,
            timed in the first steps. Left out: even ones.
        replicas: How many there are, a multiple of the number of devices, over which they are
            spread in order. The trained weights are the same bits on any number of devices of one
            kind. Left out: one per device.
        lockstep: Let replicas wait for each other wherever a step calls `compute()` of a metric,
            `all_gather`, `reduce` or `broadcast`.
        processes: How many processes per node share the devices; Lightning starts them. Left out:
            one, or those that torchrun or SLURM has started.
        seconds: How long a process waits for another one before it gives up.

    Raises:
        ValueError: If `allreduce` does not compute the sum in place, with what each device got.
        MisconfigurationException: If an option does not fit the devices or the processes.
    """

    name = "manual_allreduce"
    sums_everywhere = True

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        parallel_devices: list[str] | None = None,
        split: list[float] | Literal["auto"] | None = None,
        replicas: int | None = None,
        lockstep: bool = False,
        processes: int | None = None,
        seconds: float = 60.0,
        **kwargs: Any,
    ) -> None:
        if not callable(allreduce):
            raise ValueError(
                f"allreduce={allreduce}: give a function of a list of tensors, or leave it out."
            )
        super().__init__(parallel_devices, split, replicas, lockstep, **kwargs)
        self.allreduce, self.processes_asked_for, self.seconds = allreduce, processes, seconds

    @property
    @override
    def reduces_all(self) -> bool:
        """A subclass with a reduction of its own may keep a state: all processes have it whole."""
        own = ManualAllreduceStrategy.reduce_gradients
        return type(self).reduce_gradients is not own

    @override
    def setup(self, trainer: Trainer) -> None:
        check_allreduce(self.allreduce, self.devices)
        super().setup(trainer)

    @override
    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        """Leave the sum of the k gradients of every parameter, by its name, in each of them."""
        allreduce_many(self.allreduce, list(gradients.values()))

    @override
    def update_replicas(self, optimizer: Optimizer) -> None:
        """Every other replica makes its own update from its gradients, or gets the first's weights.

        Raises:
            RuntimeError: If replicas have drifted apart.
        """
        if not self.updates.repeat(optimizer, self.gradients.push):
            self.replicas.distrust()
            self.replicas.push_weights()
