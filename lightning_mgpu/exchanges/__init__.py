"""Communication hooks, as generators of ten lines (docs/exchanges.md). Can be deleted."""

from functools import partial

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.exchanges.check import check_exchange
from lightning_mgpu.exchanges.ef_sign import ef_sign
from lightning_mgpu.exchanges.local_sgd import LocalSGDStrategy
from lightning_mgpu.exchanges.power_sgd import power_sgd
from lightning_mgpu.exchanges.route import exact
from lightning_mgpu.exchanges.strategy import ExchangeStrategy
from lightning_mgpu.exchanges.top_k import top_k

__all__ = [
    "ExchangeStrategy",
    "LocalSGDStrategy",
    "check_exchange",
    "ef_sign",
    "exact",
    "power_sgd",
    "top_k",
]

_register = partial(StrategyRegistry.register, description="an exchange", override=True)
_register("exchange", ExchangeStrategy, exchange=exact)
_register("exchange_top_k", ExchangeStrategy, exchange=top_k)
_register("exchange_power_sgd", ExchangeStrategy, exchange=power_sgd)
_register("exchange_ef_sign", ExchangeStrategy, exchange=ef_sign)
_register("exchange_local_sgd", LocalSGDStrategy, sync_every=16)
_register("exchange_diloco", LocalSGDStrategy, sync_every=16, outer_lr=0.7, outer_momentum=0.9)
