"""Launching, control messages, consistency checks, exact logging and failures.

`ProcessPerDeviceStrategy` (strategy.py) launches processes as `ddp` does, gives each its shard of
every batch, and makes evaluation exact (evaluation.py). The `ControlPlane` (control_plane.py)
exchanges control messages: each rank contributes a short row and receives the rows of all ranks, in
shared memory on one machine, else by one message. Invariants such as batches and RNG states are
verified in these messages (consistency.py). A process that waits for one that has exited raises an
error (failures.py).
"""

from lightning_mgpu.distributed.processes.failures import PeerFailure
from lightning_mgpu.distributed.processes.strategy import ProcessPerDeviceStrategy

__all__ = ["PeerFailure", "ProcessPerDeviceStrategy"]
