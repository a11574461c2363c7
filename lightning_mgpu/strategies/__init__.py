"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch through `manual_allreduce`, in every process:

 1. ShardReader           reads the shards of my replicas, of every batch  shards/reader.py
 2. batch_to_device       moves the shards, and keeps their keys           processes/strategy.py
 3. training_step         one batch of an update                           manual_allreduce.py
 4.   Update.run_step     the user's step, on each of my shards            update.py
 5.   Update.make_loss    each shard's share of the global batch           update.py
 6. backward              my gradients                                     manual_allreduce.py
 7.   Update.run_backward a backward pass for each of my replicas          update.py
 8.   exchange_gradients  they go, and the sums come back                  manual_allreduce.py
 9.   Bucket.pack         rows of a bucket: shared memory, or a message    routes/buckets.py
10.   route               how they travel and are summed                   sending.py
11.   Courier.start       the first message leaves; buffers have their own routes/courier.py
12.   check_facts         the meeting: is all alike? whose gradients?      processes/facts.py
13.   Courier.finish      messages come, and the user's allreduce sums     routes/courier.py
14.   set_sums            sums become the gradients of parameters          manual_allreduce.py
15. compare_weights       before a checkpoint: are all replicas equal?     manual_allreduce.py

Lightning's `optimizer_step` calls stops 3 to 14 before it updates. Between CPUs of several
machines, a bucket of gradients passes stops 9 to 11 within the backward pass, as soon as all of
them are there, but in the first update. A step meets once before the sums (12) and, in shared
memory, once after them (in 13). The means of all replicas' buffers are set between 13 and 14.
routes/__init__.py has a picture.

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
