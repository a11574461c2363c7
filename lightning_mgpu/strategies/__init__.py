"""Strategies for Lightning's Trainer; importing this package registers them by name.

| file                  | what is in it                                                                     |
| --------------------- | --------------------------------------------------------------------------------- |
| `manual_allreduce.py` | the textbook's algorithm, in the order of a step; read this first                  |
| `dp.py`               | `DataParallel`'s: one set of parameters, copied for every step                     |
| `train_batch.py`      | what both do: loss and gradient of every shard, on its device                      |
| `single_process.py`   | devices, and a step split over replicas; `one_rank.py`: ranks                      |
| `shards.py`           | cut a batch; `gather.py`: put outputs together; `nesting.py`: what they are in     |
| `get_params.py`       | a copy of a module on a device                                                     |
| `replicas.py`         | the replicas: what is given to them, what is taken from them                       |
| `replicated.py`       | when: wherever somebody else may have edited the original, or looks at it          |
| `attributes.py`       | what hooks and steps keep on the module, beside weights                            |
| `twins.py`            | the replica's own in the place of layers, methods, tensors of the original         |
| `elsewhere.py`        | copies of what is on another device than the replica; `values.py`: what is in it   |
| `optimizers.py`       | copies of its optimizers make the same update; `optimizer_copies.py`: the copies   |
| `team.py`             | threads that run replicas side by side                                             |
| `device_module.py`    | `torch.cuda` for GPUs                                                              |
| `generators.py`       | states of the random generators replicas draw from                                 |
| `losses.py`           | the replicas' losses as one, whose backward pass reaches all                       |
| `gradients.py`        | parts of a sum, the sum, and what clipping and hooks make of it                    |
| `recording.py`        | `self.log` and torchmetrics, written down while replicas run                       |
| `replay.py`           | and done once afterwards, exact over replicas                                      |
| `log_calls.py`        | calls of `log` from wherever they come; `batch_sizes.py`: what they weigh          |
| `lockstep.py`         | manual optimization                                                                |
| `per_replica.py`      | the module and optimizers that code finds there, by replica                        |
| `flat_gradients.py`   | all gradients of a device in one tensor                                            |
| `buckets.py`          | gradients packed into flat buckets before they are reduced                         |
| `gradient_hooks.py`   | hooks on parameters, called with the whole batch's gradient                        |
| `editing.py`          | whether users' hooks may edit weights or gradients                                 |
| `sync_batchnorm.py`   | BatchNorm over the whole batch                                                     |
| `embeddings.py`       | `Embedding(max_norm=...)`, which edits its weights in `forward`                    |
| `own_forward.py`      | what these two put in the place of a layer's `forward`                             |
| `patches.py`          | functions of torch and Lightning that are others while a step runs                 |
| `forward_mode.py`     | forward-mode AD, one replica at a time                                             |
| `auto_split.py`       | `split="auto"`                                                                     |
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
