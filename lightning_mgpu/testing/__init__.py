"""What every strategy here promises, checked for any strategy: by its name or its dotted path.

    python -m lightning_mgpu.testing --strategy=my_package.MyStrategy --devices 2

`cases.py` has the promises and the runs that show them, `probe.py` the modules, data and Trainer of
these runs. `check.py` judges a strategy in a process of its own. `__main__` is the command.
"""

from lightning_mgpu.testing.cases import PROMISES, Promise
from lightning_mgpu.testing.check import PromiseResult, check_strategy

__all__ = ["PROMISES", "Promise", "PromiseResult", "check_strategy"]
