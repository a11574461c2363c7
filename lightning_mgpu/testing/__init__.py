"""What every strategy here promises, as checks that take any strategy: by name, or your own by its dotted path.

    python -m lightning_mgpu.testing --strategy=manual_allreduce --devices 2 3
    python -m lightning_mgpu.testing --strategy=my_package.MyStrategy --devices 2

| file        | what is in it                                                                         |
| ----------- | ------------------------------------------------------------------------------------- |
| `cases.py`  | the promises, the runs that show them, and who cannot keep them                       |
| `probe.py`  | the modules, the data and the Trainer of these runs                                   |
| `check.py`  | `check_strategy`: runs the cases in a process of their own (`worker.py`)              |
| `__main__`  | the command, and the table of docs/strategies.md                                      |
"""

from lightning_mgpu.testing.cases import PROMISES, Promise
from lightning_mgpu.testing.check import Result, check_strategy

__all__ = ["PROMISES", "Promise", "Result", "check_strategy"]
