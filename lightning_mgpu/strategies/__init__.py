"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

How `manual_allreduce` trains on a batch, in every process (one process per replica):

 1. ShardReader              reads this replica's shard of the global batch  sharding/reader.py
 2. batch_to_device          moves the shard to the device                   processes/strategy.py
 3. training_step            runs the user's training step                   manual_allreduce.py
 4.   window.make_loss       weights the loss by the shard's share           window.py
 5. backward                 computes this replica's gradients               manual_allreduce.py
 6.   window.run_backward    accumulates gradients over a window's batches   window.py
 7.   exchange_gradients     runs 8 to 12, after the last batch of a window  manual_allreduce.py
 8.   GradientSync.reduce    verifies consistency by one control message     gradient_sync.py
 9.   BucketReducer          sends buckets, during the backward pass         comm/reducer.py
10.   sum_gathered           gathers a bucket and calls the allreduce        comm/schedules.py
11.   Transport              sends and receives the messages                 comm/transport.py
12.   set_sums               writes the sums to the parameters' gradients    manual_allreduce.py
13. compare_weights          verifies equal weights before a checkpoint      processes/strategy.py

Lightning's `optimizer_step` calls 3 to 12 before the optimizer steps. Between CPUs of several
machines, communication overlaps the backward pass (9), except in the first step. One control
message precedes the sums (8); in shared memory, another follows (11). Buffers are sent as well.

`dp` (dp.py) uses one process: shards, copies of the parameters, one backward pass, one optimizer.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu import allreduce
from lightning_mgpu.strategies.dp import DataParallelStrategy
from lightning_mgpu.strategies.manual_allreduce import ManualAllreduceStrategy

__all__ = ["DataParallelStrategy", "ManualAllreduceStrategy"]

StrategyRegistry.register(
    "dp", DataParallelStrategy, description="one process, like nn.DataParallel", override=True
)
StrategyRegistry.register(
    "manual_allreduce",
    ManualAllreduceStrategy,
    description="one process per device, textbook_allreduce on gathered gradients",
    override=True,
)
for _name in ("tree", "sharded", "ring", "halving_doubling", "key_value"):
    StrategyRegistry.register(
        f"manual_allreduce_{_name}",
        ManualAllreduceStrategy,
        description=f"one process per device, {_name}_allreduce as written",
        override=True,
        allreduce=getattr(allreduce, f"{_name}_allreduce"),
        as_written=True,
    )
