"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch through `manual_allreduce`, in every process:

 1. ShardLoader           the shards of my replicas, of every batch               loaders.py
 2. training_step         the user's step, on each of my shards           manual_allreduce.py
 3.   write_buffers       all replicas get the same buffers                        buffers.py
 4.   share_out           the global batch's size, and each shard's share   manual_allreduce.py
 5. backward              my gradients                                    manual_allreduce.py
 6.   exchange_gradients  they go into rows, and the sums come back       manual_allreduce.py
 7.   Exchange.sum        the user's allreduce, on all replicas' rows             exchange.py
 8. optimizer_step        my update; Lightning calls stops 2 to 7 in it   manual_allreduce.py
 9. compare_weights       before a checkpoint: are all replicas equal?           processes.py

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
