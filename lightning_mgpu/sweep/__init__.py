"""Sweeps without an account: `python -m lightning_mgpu sweep`, on the YAML files that `wandb sweep` takes.

| file        | what is in it                                              |
| ----------- | ---------------------------------------------------------- |
| `cli.py`    | the command                                                |
| `plan.py`   | a sweep's YAML, and what the trials of a sweep are         |
| `bayes.py`  | the next trial from those before it, by optuna             |
| `trial.py`  | one trial: a `fit` in a process of its own, and how it went |
| `report.py` | table, CSV and picture                                     |
"""
