"""`dp`, data parallelism as in `torch.nn.DataParallel`, which the Lightning Trainer dropped in 2.0.

One set of parameters, on the first device. Every step begins with copying it to the others (replicate), the batch is
split (scatter) and the replicas run side by side; their outputs and gradients come back to the first device (gather),
where one optimizer makes one update. `manual_allreduce` differs in two things: there parameters live on all devices,
and gradients meet on all of them, so that every replica makes the update itself.

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=dp
"""

from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_mgpu.strategies.train_batch import TrainBatchStrategy


class DataParallelStrategy(TrainBatchStrategy):
    """One set of parameters, replicated to k devices of one process for every step; CPU devices run in threads.

    Args:
        parallel_devices: The devices, `["cuda:0", "cpu"]` say; one may stand there several times. Left out: those of
            `Trainer(accelerator, devices)`.
        split: Relative shares of the batch, one a device, or `auto`: in proportion to each device's speed, timed in the
            first steps. Left out: even ones.

    Raises:
        MisconfigurationException: If started as several processes (torchrun, SLURM).
    """

    name = "dp"
    replicas_update = False

    def __init__(
        self,
        parallel_devices: list[str] | None = None,
        split: list[float] | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(parallel_devices, split, **kwargs)

    @override
    def run_step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[Any]]:
        self._is_stale = True  # replicate
        return super().run_step(name, batch, *args, **kwargs)

    @override
    def reduce_gradients(self) -> None:
        """Add the replicas' gradients up on the first device."""
        if len(self.devices) > 1:
            self.gradients.reduce(reduce_add)
            self.gradients.drop_copies()

    @override
    def update_replicas(self, n: int) -> None:
        if self._lockstep is not None:  # the rest of a manually optimized step goes on with the new parameters
            self._replicas.broadcast_parameters()


def reduce_add(gradients: list[list[Tensor]]) -> None:
    """For every parameter, add the gradients of all devices to that of the first, in order."""
    for first, *others in gradients:
        for other in others:
            first.add_(other.to(first.device))
