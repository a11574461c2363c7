"""A strategy that is one process, whatever the number of its devices: rank 0 of 1, with nobody to exchange anything."""

import contextlib
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override


class OneRank(ParallelStrategy):
    """Ranks and collectives; refuses to be one of several processes."""

    name = "this strategy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_nodes = 1  # the Trainer sets what it was asked for

    # Whatever the environment says
    global_rank = local_rank = node_rank = 0  # type: ignore[assignment]
    world_size = 1  # type: ignore[assignment]
    is_global_zero = True  # type: ignore[assignment]
    is_distributed = False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For a `DistributedSampler` of the user's own: the whole batch comes from this process."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_environment(self) -> None:
        processes = 1
        if self.cluster_environment is not None:
            with contextlib.suppress(KeyError):  # the variables of a launcher that has launched nothing
                processes = self.cluster_environment.world_size()
        if processes > 1 or self.num_nodes > 1:
            what = f"num_nodes={self.num_nodes}" if processes == 1 else f"{processes} were launched (torchrun, SLURM)"
            raise MisconfigurationException(
                f"{self.name} drives all its devices from one process on one node, but {what}: use "
                "--trainer.strategy=ddp for several processes, or start a single one."
            )
        super().setup_environment()

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        return

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision
