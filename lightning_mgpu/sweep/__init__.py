"""Many runs from one YAML, without an account: `python -m lightning_mgpu sweep`. `wandb sweep` takes the same files.

`plan.py` reads the YAML, `trials.py` chooses and runs trials, `trial.py` makes a `fit` a trial, `report.py` shows them.
"""

from lightning_mgpu.sweep.trial import Trial

__all__ = ["Trial"]
