"""`all_gather`, `reduce` and `broadcast` in a step, between replicas that wait for each other.

In such a step `self.global_rank` is the replica's number and `trainer.world_size` is how many there
are, as under `ddp`. Elsewhere all processes have the same values, and the world size is 1. Only
decisions and broadcast objects travel: for example, clocks differ between processes.
"""

import copy
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.strategies.launching import SETUP_SECONDS, Launching
from lightning_mgpu.strategies.split_batch import send


class Collectives(Launching):
    """The collectives of a strategy."""

    lockstep: Any = None  # a Lockstep, while the strategy is set up
    in_plain_step = False  # whether several replicas run a step one after the other

    @property
    def _running(self) -> Any:
        return self.lockstep.running if self.lockstep else None

    @property
    def global_rank(self) -> int:
        return self._running.index if self._running else self.process_rank

    @property
    def local_rank(self) -> int:
        return self._running.index if self._running else self._ask_rank("local_rank")

    @property
    def world_size(self) -> int:
        return len(self.lockstep.active) if self._running else 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the replicas' tensors, of one shape: (k, ...). With gradients if `sync_grads`.

        Raises:
            RuntimeError: If replicas do not wait for each other, or if shapes differ.
        """
        if (lockstep := self._lockstep("all_gather")) is None:
            return tensor
        tensor = tensor if sync_grads else tensor.detach()
        given = [each for (each,) in lockstep.exchange("all_gather", [tensor])]
        if len(shapes := {tuple(each.shape) for each in given}) > 1:
            raise RuntimeError(
                f"all_gather stacks tensors of one shape, but the shards' are {sorted(shapes)}: "
                "use a batch size that the replicas can share evenly, and drop_last=True."
            )
        return torch.stack(given)

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any
    ) -> Any:
        """The mean, or the sum, of the replicas' tensors."""
        if not isinstance(tensor, Tensor) or (lockstep := self._lockstep("reduce")) is None:
            return tensor
        given = torch.stack([each for (each,) in lockstep.exchange("reduce", [tensor.detach()])])
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        reductions: dict[str, Any] = {"mean": torch.mean, "avg": torch.mean, "sum": torch.sum}
        reductions |= {"max": torch.amax, "min": torch.amin}
        if name not in reductions:
            raise ValueError(f"reduce_op={reduce_op!r}: choose one of {', '.join(reductions)}.")
        return reductions[name](given, 0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all replicas, or any, have decided so."""
        if (lockstep := self._lockstep("reduce_boolean_decision")) is None:
            given = self.processes.share("reduce_boolean_decision", decision)
        else:
            given = [each for (each,) in lockstep.exchange("reduce_boolean_decision", [], decision)]
        return min(given) if all else max(given)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A copy of what replica `src` has, without graphs; outside of steps, of process `src`."""
        if (lockstep := self._lockstep("broadcast")) is None:
            shared = self.processes.share("broadcast", obj if self.process_rank == src else None)
            return shared[src] if src < self.processes.num > 1 else obj
        index, given = self._running.index, None
        if index == src:  # a copy: this replica may edit its own before the others have theirs
            given = copy.deepcopy(apply_to_collection(obj, Tensor, Tensor.detach))
        shared = lockstep.exchange("broadcast", [], given)[src][0]
        return send(copy.deepcopy(shared), lockstep.devices[src], lockstep.devices[index])

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other processes, as one may prepare data."""
        self.processes.share("barrier", None, SETUP_SECONDS)

    def _lockstep(self, name: str) -> Any:
        """The lockstep by which a replica exchanges. None outside of steps."""
        if self.in_plain_step:
            raise RuntimeError(
                f"{name}() in a step needs what all replicas have: set lockstep=True "
                "(--trainer.strategy.lockstep=true)."
            )
        return self.lockstep if self._running else None
