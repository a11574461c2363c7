"""What every strategy here promises, as checks of any: by name, or your own by its dotted path.

    python -m lightning_mgpu.testing --strategy=my_package.MyStrategy --devices 2

`cases.py` has the promises and the runs that show them, `probe.py` the modules, data and Trainer of
these runs. `check.py` judges a strategy in a process of its own. `__main__` is the command.
"""

from lightning_mgpu.testing.cases import PROMISES, Promise
from lightning_mgpu.testing.check import Result, check_strategy

__all__ = ["PROMISES", "Promise", "Result", "check_strategy"]
