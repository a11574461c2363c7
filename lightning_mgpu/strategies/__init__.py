"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch, from the loader to the update. The methods that the Trainer calls stand in `train_batch.py`. Read
the other files in the order of the stops.

    `optimizer_step`          the Trainer's update: stops 1 to 9 are its closure           train_batch.py
 1.   `training_step`         the whole batch comes, on the first device                   train_batch.py
 2.     `split_batch`         the batch is cut into one shard a replica                    split_batch.py
 3.     `Recorder.recording`  what replicas log is written down, and logged once           recording.py
 4.     `Replicas.begin`      `get_params`: every replica has copies of the parameters     replicas.py
 5.     `turn(i)`             they become the module's; the user's step runs on shard i    replicas.py
 6.     `Gradients.join`      k losses become the whole batch's, which the Trainer gets    gradients.py
 7.   `backward`              its backward pass runs every replica's, each in its turn     gradients.py
 8.     `reduce_gradients`    the allreduce                                                manual_allreduce.py, dp.py
 9.   hooks, clipping         the Trainer's, on the first replica's gradients
10.   the user's optimizer    updates the first replica
11.   `update_replicas`       the others repeat the update, or get a copy                  updates.py

Besides:

`lockstep.py` runs replicas that wait for each other in a step: in manual optimization (`manual_optimization.py`), and
in BatchNorm (`sync_batchnorm.py`). `one_process.py` has devices by name, ranks and launchers, and a strategy's own part
of a checkpoint.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.allreduce import (
    blocked_allreduce,
    compiled_allreduce,
    foreach_allreduce,
    ring_allreduce,
    sharded_allreduce,
    textbook_allreduce,
    tree_allreduce,
)
from lightning_mgpu.strategies.dp import DataParallelStrategy
from lightning_mgpu.strategies.manual_allreduce import ManualAllreduceStrategy

__all__ = ["DataParallelStrategy", "ManualAllreduceStrategy"]

StrategyRegistry.register(
    "dp",
    DataParallelStrategy,
    description="one set of parameters, replicated to several devices of one process for every step",
    override=True,
)

for _name, _allreduce in {
    "manual_allreduce": textbook_allreduce,
    "manual_allreduce_tree": tree_allreduce,
    "manual_allreduce_sharded": sharded_allreduce,
    "manual_allreduce_ring": ring_allreduce,
    "manual_allreduce_blocked": blocked_allreduce,
    "manual_allreduce_foreach": foreach_allreduce,
    "manual_allreduce_compiled": compiled_allreduce,
}.items():
    StrategyRegistry.register(
        _name,
        ManualAllreduceStrategy,
        description=f"replicas on several devices of one process, {_allreduce.__name__} of their gradients",
        override=True,
        allreduce=_allreduce,
    )
