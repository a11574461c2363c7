"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch, from the loader to the update. The Trainer calls the functions that are not
indented; these call the others. Read the files in the order of the stops.

 1. optimizer_step             the Trainer's update; its closure makes stops 3 to 32  train_batch.py
 2.   Window.closing           warns if an update's losses count nothing              loss_weight.py
 3. training_step              the whole batch comes, on the first device             train_batch.py
 4.   Window.begin_batch       perhaps the first of an accumulation window            loss_weight.py
 5.   share_out                how many samples each replica gets                     split_batch.py
 6.   cut_graph                the batch loses its graph, if it has one               split_batch.py
 7.   split_batch              the batch becomes k shards                             split_batch.py
 8.   send                     each shard goes to its replica's device                split_batch.py
 9.   Replicas.find            what the module holds, if it changed            replicas.py, state.py
10.   Recorder.recording       from here on k records are written                         records.py
11.   Replicas.begin           get_params: replicas get what the first has     replicas.py, state.py
12.   Edits.begin              edits of buffers count from here on                          edits.py
13.   Updates.begin            ... and, on demand, the optimizers' states                 updates.py
14.   turn                     the user's training_step runs on shard i ...              run_step.py
15.     Replicas.enter         ... while the module is replica i                         replicas.py
16.     Updates.use_state_of   ... and the optimizers have its parameters                 updates.py
17.   Edits.find               edits of weights and buffers go into the record              edits.py
18.   Replicas.statistics      ... BatchNorm's statistics                                replicas.py
19.   Merger.changes           ... and changes of Python objects                          merging.py
20.   share_records            every process gets the records of all replicas        same_program.py
21.   Recorder.combine_calls   logs and metrics are replayed, once       records.py, metric_calls.py
22.   average_statistics       k BatchNorm statistics become one                        combining.py
23.   Merger.combine           k changes of Python objects become one                     merging.py
24.   Edits.combine            warns of weights that differ                                 edits.py
25.   gather                   k outputs become one                                     combining.py
26.   Gradients.join           k losses become one, which the Trainer gets              gradients.py
27.   Window.weigh             its weight in the window                               loss_weight.py
28. backward                   the replicas' backward passes, in turns  train_batch.py, gradients.py
29.   Reducer.reduce           gradients meet, from this process and others              reducing.py
30.     Processes.share        by messages                                              processes.py
31.   reduce_gradients         the allreduce                              manual_allreduce.py, dp.py
32. hooks, clipping            the Trainer's, on the first replica's gradients
33. the optimizer              updates the first replica
34. update_replicas            the others follow                          manual_allreduce.py, dp.py
35.   Updates.repeat           ... by an update of their own, if they can                 updates.py

Not on the way: `layers.py` finds what replicas have of their own. `hooks.py` knows which user code
may edit weights between two steps. `equality.py` compares replicas. `lockstep.py` runs replicas
that wait for each other within a step; then `manual_optimization.py`, `sync_batchnorm.py` and
`collectives.py` say for what. `launching.py` finds out which process this is. `streams.py` has
random numbers, `auto_split.py` uneven shares, and `devices_and_attributes.py` what all files need.
`names.py` finds a strategy by its name.
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
        description=f"replicas on several devices, {_allreduce.__name__}",
        override=True,
        allreduce=_allreduce,
    )
