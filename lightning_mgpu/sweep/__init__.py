"""Many runs from one YAML, without an account: `python -m lightning_mgpu sweep`. `wandb sweep` takes the same files.

| file        | what is in it                                                    |
| ----------- | ---------------------------------------------------------------- |
| `cli.py`    | the command: which trial is next                                 |
| `plan.py`   | a sweep's YAML: what varies, and what all trials share           |
| `trial.py`  | one trial: a `fit` in a process of its own, without a test       |
| `report.py` | table and picture                                                |
"""

from lightning_mgpu.sweep.trial import Trial

__all__ = ["Trial"]
