"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

A batch under `manual_allreduce`, in every process (a replica is a process):

 1. ShardReader              reads this replica's shard of the global batch  sharding/reader.py
 2. batch_to_device          moves the shard                                 processes/strategy.py
 3. training_step            the user's step                                 manual_allreduce.py
 4.   window.make_loss       weights the loss by the shard's share           window.py
 5. backward                 this replica's gradients                        manual_allreduce.py
 6.   window.run_backward    beside those of earlier batches                 window.py
 7.   exchange_gradients     from here to 12, in the last batch of a window  manual_allreduce.py
 8.   GradientSync.reduce    one control message: do all processes agree?    gradient_sync.py
 9.   BucketReducer          sends buckets, during the backward pass         comm/reducer.py
10.   sum_gathered           gathers a bucket, and calls the allreduce       comm/schedules.py
11.   Transport              carries the messages                            comm/transport.py
12.   set_sums               sums become the gradients of parameters         manual_allreduce.py
13. compare_weights          before a checkpoint: are all replicas equal?    processes/strategy.py

Lightning's `optimizer_step` calls 3 to 12 before it updates. Between CPUs of several machines,
buckets are sent during the backward pass (9), but in the first update. There is one control message
before the sums (8) and, in shared memory, one after them (in 11). Buffers are sent beside the
gradients.

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
StrategyRegistry.register(
    "manual_allreduce",
    ManualAllreduceStrategy,
    description="a process per device, textbook_allreduce on gathered gradients",
    override=True,
)
for _name in ("tree", "sharded", "ring", "halving_doubling", "key_value"):
    StrategyRegistry.register(
        f"manual_allreduce_{_name}",
        ManualAllreduceStrategy,
        description=f"a process per device, {_name}_allreduce as written",
        override=True,
        allreduce=getattr(allreduce, f"{_name}_allreduce"),
        as_written=True,
    )
