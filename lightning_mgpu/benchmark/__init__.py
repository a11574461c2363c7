"""Measurements on your own machine: `python -m lightning_mgpu benchmark`.

| file                  | what is in it                                                                     |
| --------------------- | --------------------------------------------------------------------------------- |
| `cli.py`              | the command                                                                       |
| `plan.py`             | what is measured, in which order                                                  |
| `processes.py`        | a fresh process for every measurement; the machine and its load                   |
| `steps.py`            | in such a process: the steps of a Trainer, or of the loop of `references.py`      |
| `parts.py`            | the clock, and where the time of a step goes                                      |
| `report.py`           | medians, ratios within a repeat, the table and the picture                        |
| `exchange.py`         | the allreduce functions alone; `exchange_worker.py` times one, in its process     |
| `time_to_accuracy.py` | seconds until a test accuracy                                                     |
"""
