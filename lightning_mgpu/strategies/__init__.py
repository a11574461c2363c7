"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name.

What happens to a batch, in this order; read the files in it, too:

| file                     | what happens                                                               |
| ------------------------ | -------------------------------------------------------------------------- |
| `manual_allreduce.py`    | the textbook's algorithm: where gradients meet, and who makes the update   |
| `dp.py`                  | `DataParallel`'s answer to the same two questions                          |
| `train_batch.py`         | a step, from the batch to the update; what the other files are called from |
| `split_batch.py`         | the batch is cut into shards                                               |
| `replicas.py`            | one module, k sets of parameters, put into it in turn                      |
| `gather.py`              | what the replicas return is put together                                   |
| `gradients.py`           | k losses become one; its backward pass ends where the gradients meet       |
| `updates.py`             | every replica makes its own update                                         |

What a model may need besides:

| file                     | for whom                                                                   |
| ------------------------ | -------------------------------------------------------------------------- |
| `recording.py`           | `self.log` and torchmetrics                                                |
| `streams.py`             | dropout: random numbers of each replica                                    |
| `lockstep.py`            | replicas that meet in the middle of a step                                 |
| `manual_optimization.py` | ... in `manual_backward` and in an optimizer's `step`                      |
| `sync_batchnorm.py`      | ... in BatchNorm                                                           |
| `one_process.py`         | devices by name, ranks and launchers, checkpoints                          |
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
