"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch, from the loader to the update. The Trainer calls methods in `train_batch.py`;
read the other files in the order of the stops.

    optimizer_step         the Trainer's update: stops 1 to 9 are its closure   train_batch.py
 1.   training_step        the whole batch comes, on the first device           train_batch.py
 2.     split_batch        it is split into one shard per replica               split_batch.py
 3.     Recorder           what replicas log is written into their records      records.py
 4.     Replicas.begin     get_params: every replica has its own parameters,    replicas.py
                           attributes, lists and dicts                          state.py
 5.     turn(i)            they become the module's; the step runs on shard i   train_batch.py
 6.     combine            k records become one step's                          combining.py,
                                                                     metric_calls.py, merging.py
 7.     Gradients.join     k losses become one, which the Trainer gets          gradients.py
 8.   backward             each replica's backward pass runs in its turn        gradients.py
 9.     reduce_gradients   the allreduce                                  manual_allreduce.py, dp.py
10.   hooks, clipping      the Trainer's, on the first replica's gradients
11.   the optimizer        updates the first replica
12. update_replicas        the others make the same update, or get a copy       updates.py

Besides: `hooks.py` knows which code of the user's may edit weights between two steps. `equality.py`
compares replicas. `lockstep.py` runs replicas that wait for each other in a step, for manual
optimization (`manual_optimization.py`), BatchNorm (`sync_batchnorm.py`), `all_gather`
(`collectives.py`), or a metric's `compute()`. `one_process.py` refuses launchers, and has
a strategy's own part of a checkpoint; `devices_and_attributes.py` small things that all use;
`streams.py` random numbers; `auto_split.py` uneven shares.
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
    description="one set of parameters, copied to several devices of one process for every step",
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
        description=f"replicas on several devices of one process, {_allreduce.__name__}",
        override=True,
        allreduce=_allreduce,
    )
