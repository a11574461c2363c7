"""Strategies for Lightning's Trainer. `import lightning_mgpu` registers them by name."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.strategies.dp import DataParallelStrategy

__all__ = ["DataParallelStrategy"]

StrategyRegistry.register(
    "dp",
    DataParallelStrategy,
    description="one set of parameters, copied to several devices of one process for every step",
    override=True,
)
