"""What every strategy here promises, as checks that take any strategy: by name, or your own by its dotted path.

    python -m lightning_mgpu.testing --strategy=manual_allreduce --devices 2 3
    python -m lightning_mgpu.testing --strategy=my_package.MyStrategy --devices 2

| file          | what is in it                                                             |
| ------------- | ------------------------------------------------------------------------- |
| `promises.py` | the promises, each with the case that shows it and how it is judged        |
| `cases.py`    | small runs of a Trainer, and what is seen in them                          |
| `probe.py`    | the module, the data and the callbacks they are made of                    |
| `worker.py`   | runs cases under one strategy, in a process (and its children) of its own  |
| `check.py`    | starts the workers and judges a strategy against one device               |
| `table.py`    | the table strategy x promise of docs/strategies.md                         |
"""

from lightning_mgpu.testing.check import Result, check_strategy
from lightning_mgpu.testing.promises import PROMISES, Promise

__all__ = ["PROMISES", "Promise", "Result", "check_strategy"]
