"""Launching, control messages, consistency checks, exact logging and failures.

`ProcessPerDeviceStrategy` (strategy.py) launches one process per device like `ddp`, shards every
batch, and makes evaluation exact (evaluation.py). The `ControlPlane` (control_plane.py) exchanges
control messages: each rank contributes a short row and receives the rows of all ranks, in shared
memory on one machine, else in one message. Invariants such as batches and RNG states are verified
in these messages (consistency.py). If a process exits, the waiting processes raise an error
(failures.py).
"""

from lightning_mgpu.distributed.processes.failures import PeerFailure
from lightning_mgpu.distributed.processes.strategy import ProcessPerDeviceStrategy

__all__ = ["PeerFailure", "ProcessPerDeviceStrategy"]
