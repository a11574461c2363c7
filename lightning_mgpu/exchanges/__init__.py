"""Exchanges: one replica's side of an allreduce, a generator of ten lines. Can be deleted.

It gets `X`, the gradient of this replica's shard times its share, and `state`, a dict of its own
for this parameter, with `name`, `replica` and `num_replicas`. `yield` sends tensors to all
replicas, and gets a list of what all have sent, in their order. The result takes the gradient's
place: `return sum((yield X))` is the exact sum. More is in docs/exchanges.md.
"""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.exchanges.check import check_exchange
from lightning_mgpu.exchanges.exact import exact
from lightning_mgpu.exchanges.power_sgd import power_sgd
from lightning_mgpu.exchanges.sign import sign
from lightning_mgpu.exchanges.strategy import ExchangeStrategy
from lightning_mgpu.exchanges.top_k import top_k

__all__ = ["ExchangeStrategy", "check_exchange", "exact", "power_sgd", "sign", "top_k"]

OPTIONS: dict[str, dict[str, Any]] = {
    "exchange": {"exchange": exact},
    "exchange_top_k": {"exchange": top_k},
    "exchange_power_sgd": {"exchange": power_sgd},
    "exchange_sign": {"exchange": sign},
    "exchange_local_sgd": {"every": 16},
    "exchange_diloco": {"every": 16, "outer_lr": 0.7, "outer_momentum": 0.9},
}
for _name, _options in OPTIONS.items():
    StrategyRegistry.register(_name, ExchangeStrategy, "an exchange", override=True, **_options)
