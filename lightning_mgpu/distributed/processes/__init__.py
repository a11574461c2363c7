"""What several processes need to train as one: `strategies/` builds on it.

`ProcessPerDeviceStrategy` (strategy.py) launches processes as `ddp` does, gives each its shard of
every batch, and makes evaluations exact. Processes exchange control messages: each contributes a
short row, and all get the rows of all (meeting.py), in shared memory if all of them are on one
machine, else by one message. So they compare what has to be identical (consistency.py). A process
that waits for one that has ended raises an error (ends.py).
"""

from lightning_mgpu.distributed.processes.ends import ProcessEnded
from lightning_mgpu.distributed.processes.strategy import ProcessPerDeviceStrategy

__all__ = ["ProcessEnded", "ProcessPerDeviceStrategy"]
