"""Measurements on your own machine: `python -m lightning_mgpu benchmark`.

| file            | what is in it                                                            |
| --------------- | ------------------------------------------------------------------------ |
| `cli.py`        | the command                                                              |
| `plan.py`       | what is measured, in which order                                         |
| `runner.py`     | a fresh process for every measurement                                    |
| `worker.py`     | what runs in it: a Trainer, or the loops of `references.py`              |
| `parts.py`      | where the time of a step goes                                            |
| `summary.py`    | medians, ratios, efficiency                                              |
| `report.py`     | the table and the pictures; `compare.py` holds two reports side by side  |
| `exchange.py`   | the allreduce functions alone; `exchange_processes.py`: gloo and NCCL; `exchange_report.py` |
| `time_to_accuracy.py` | seconds until a test accuracy                                      |
| `directory.py`, `cores.py` | where a report goes, and the cores and the memory there are  |
| `timing.py`     | the book's `Timer` and `Benchmark`                                       |
| `data_path.py`  | this package's data path against torchvision's, by itself                |
"""

from lightning_mgpu.benchmark.timing import Benchmark, Timer

__all__ = ["Benchmark", "Timer"]
