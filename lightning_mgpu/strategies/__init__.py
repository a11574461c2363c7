"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.allreduce import (
    foreach_allreduce,
    ring_allreduce,
    sharded_allreduce,
    textbook_allreduce,
    tree_allreduce,
)
from lightning_mgpu.strategies.manual_allreduce import ManualAllreduceStrategy

__all__ = ["ManualAllreduceStrategy"]

for _name, _allreduce in {
    "manual_allreduce": textbook_allreduce,
    "manual_allreduce_tree": tree_allreduce,
    "manual_allreduce_sharded": sharded_allreduce,
    "manual_allreduce_ring": ring_allreduce,
    "manual_allreduce_foreach": foreach_allreduce,
}.items():
    StrategyRegistry.register(
        _name,
        ManualAllreduceStrategy,
        description=f"a process per device, {_allreduce.__name__}",
        override=True,
        allreduce=_allreduce,
    )
