"""`dp`, data parallelism as in `torch.nn.DataParallel`, which the Lightning Trainer dropped in 2.0.

One set of parameters counts, on the first device. Gradients are added up there, one optimizer
makes one update, and the other devices get copies of the result. In `manual_allreduce` all devices
get the sums, and every replica updates itself.

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=dp
"""

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.allreduce.messages import add_all
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy


class DataParallelStrategy(TrainBatchStrategy):
    """One set of parameters, copied to the other devices of one process after every update.

    The options are those of `ManualAllreduceStrategy`, without `allreduce` and `processes`.

    Raises:
        MisconfigurationException: If an option does not fit the devices, or under torchrun, SLURM.
    """

    name = "dp"
    takes_processes = False
    sums_everywhere = False

    @override
    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        """Add the gradients up on the first device, in order."""
        totals, *others = zip(*gradients.values()) if gradients else ((),)
        for other in others:
            add_all(totals, other)

    @override
    def update_replicas(self, optimizer: Optimizer) -> None:
        self.replicas.distrust()
        self.replicas.push_weights()
