"""Strategies for Lightning's Trainer; importing this package registers them by name.

| file                  | what is in it                                                      |
| --------------------- | ------------------------------------------------------------------ |
| `manual_allreduce.py` | the textbook's algorithm, in the order of a step; read this first  |
| `dp.py`               | `DataParallel`'s: one set of parameters, copied for every step     |
| `train_batch.py`      | what both do: loss and gradient of every shard, on its device      |
| `replicated.py`       | replicas kept alike wherever somebody may have edited the original |
| `single_process.py`   | devices, and a step split over replicas; `one_rank.py`: ranks      |
| `own_state.py`        | what a strategy keeps from step to step, in checkpoints            |
| `editing.py`          | whether users' hooks may edit weights or gradients                 |
| `auto_split.py`       | `split="auto"`                                                     |

They are made of these, each of which imports only from those above it:

| directory     | what is in it                                                                  |
| ------------- | ------------------------------------------------------------------------------ |
| `batch/`      | a batch cut into shards (`split_batch` of the book), outputs put together      |
| `threads/`    | the threads that run replicas side by side, and what torch keeps by the thread |
| `layers/`     | BatchNorm over the whole batch; other layers that know of the other replicas   |
| `replicas/`   | copies of a module on other devices (`get_params` of the book), kept alike     |
| `recording/`  | `self.log` and torchmetrics, exact over replicas                               |
| `gradients/`  | from the replicas' losses to one gradient                                      |
| `optimizers/` | every replica's own update; manual optimization                                |
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
