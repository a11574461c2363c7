"""What several processes need to train as one: `strategies/` builds on it.

`ProcessPerDeviceStrategy` (strategy.py) starts processes as `ddp` does, gives each its part of
every batch, and makes evaluations exact. Processes *meet*: each brings a short row, and all get the
rows of all (meeting.py), in shared memory if all of them are in one machine, else by one message.
So they compare what has to be alike (facts.py). A process that waits for one that has ended says so
(ends.py).
"""

from lightning_mgpu.processes.ends import ProcessEnded
from lightning_mgpu.processes.strategy import ProcessPerDeviceStrategy

__all__ = ["ProcessEnded", "ProcessPerDeviceStrategy"]
