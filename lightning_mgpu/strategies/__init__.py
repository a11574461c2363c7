"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

The way of a batch, from the loader to the update. The Trainer calls the strategy's `training_step`, `backward` and
`optimizer_step`; what stands between them is in `train_batch.py`.

| stop                 | where                  | what happens                                                            |
| -------------------- | ---------------------- | ----------------------------------------------------------------------- |
| 1 `training_step`    | `train_batch.py`       | the Trainer brings the whole batch, on the first device                 |
| 2 `split_batch`      | `split_batch.py`       | the batch is cut into one shard a replica                               |
| 3 `begin`            | `replicas.py`          | every replica has copies of the module's parameters and buffers         |
| 4 `turn(i)`          | `replicas.py`          | the module's tensors become replica i's; the user's `training_step` runs |
| 5 `recording`        | `recording.py`         | what replicas have logged reaches the Trainer once, for the whole batch |
| 6 `join`             | `gradients.py`         | k losses become one, which the Trainer gets                             |
| 7 `backward`         | `gradients.py`         | its backward pass runs that of every replica, each in its turn          |
| 8 `reduce_gradients` | `manual_allreduce.py`  | the gradients meet: the allreduce. `dp.py` has another answer           |
| 9 `optimizer_step`   | `train_batch.py`       | after hooks and clipping the user's optimizer updates the first replica |
| 10 `update_replicas` | `updates.py`           | the other replicas make their own update, or get a copy                 |

Besides:

| file                     | for whom                                                                            |
| ------------------------ | ----------------------------------------------------------------------------------- |
| `gather.py`              | what steps return: the inverse of `split_batch`                                     |
| `streams.py`             | dropout: random numbers of each replica                                             |
| `lockstep.py`            | replicas that meet in the middle of a step                                          |
| `manual_optimization.py` | ... in `manual_backward` and in an optimizer's `step`                               |
| `sync_batchnorm.py`      | ... in BatchNorm                                                                    |
| `one_process.py`         | devices by name, ranks and launchers, a strategy's own part of a checkpoint         |
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
