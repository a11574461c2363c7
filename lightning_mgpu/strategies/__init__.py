"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch through `manual_allreduce`, in every process:

 1. ShardReader           reads the shards of my replicas, of every batch  shards/reader.py
 2. training_step         the user's step, on each of my shards            manual_allreduce.py
 3.   read_buffers        my replicas' buffers, as they are after it       buffers.py
 4.   shares_of_batch     each shard's share of the global batch           shards/loader.py
 5. backward              my gradients                                     manual_allreduce.py
 6.   exchange_gradients  they go, and the sums come back                  manual_allreduce.py
 7.   Bucket.pack         rows of a bucket: shared memory, or a message    routes/buckets.py
 8.   route               how they travel and are summed                   manual_allreduce.py
 9.   Courier.start       the first message leaves                         routes/courier.py
10.   compare_facts       the meeting: is all alike? whose gradients?      processes/strategy.py
11.   Courier.finish      messages come, and the user's allreduce sums     routes/courier.py
12.   share_buffers       all replicas get the same buffers                manual_allreduce.py
13. optimizer_step        my update; Lightning calls stops 2 to 12 in it   manual_allreduce.py
14. compare_weights       before a checkpoint: are all replicas equal?     manual_allreduce.py

Between CPUs of several machines, a bucket of gradients passes stops 7 to 9 within the backward
pass, as soon as all of them are there. A step meets once before the sums (10) and, in shared
memory, once after them (in 11). routes/__init__.py has more of the buckets.

`dp` (dp.py) is one process: shards, copies of the parameters, one backward pass, one update.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu import allreduce
from lightning_mgpu.strategies.dp import DataParallelStrategy
from lightning_mgpu.strategies.manual_allreduce import ManualAllreduceStrategy

__all__ = ["DataParallelStrategy", "ManualAllreduceStrategy"]

StrategyRegistry.register(
    "dp", DataParallelStrategy, description="one process, as nn.DataParallel", override=True
)
for _name in ("textbook", "tree", "sharded", "ring", "key_value", "foreach"):
    StrategyRegistry.register(
        "manual_allreduce" if _name == "textbook" else f"manual_allreduce_{_name}",
        ManualAllreduceStrategy,
        description=f"a process per device, {_name}_allreduce",
        override=True,
        allreduce=getattr(allreduce, f"{_name}_allreduce"),
    )
