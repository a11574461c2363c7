"""Measurements on your own machine: `python -m lightning_mgpu benchmark`.

| file                  | what is in it                                                              |
| --------------------- | -------------------------------------------------------------------------- |
| `cli.py`              | the command                                                                |
| `plan.py`             | what is measured, in which order                                           |
| `runner.py`           | a fresh process for every measurement                                      |
| `worker.py`           | what runs in the process: a Trainer, or the loops of `references.py`       |
| `parts.py`            | where the time of a step goes                                              |
| `report.py`           | medians, ratios, the table and the picture; `compare.py`: two reports      |
| `exchange.py`         | the allreduce functions alone, in the processes of `exchange_worker.py`    |
| `time_to_accuracy.py` | seconds until a test accuracy                                              |
| `timing.py`           | the book's `Timer` and `Benchmark`                                         |
"""

from lightning_mgpu.benchmark.timing import Benchmark, Timer

__all__ = ["Benchmark", "Timer"]
