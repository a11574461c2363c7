"""Many runs of one YAML, no account: `python -m lightning_mgpu sweep`. `wandb sweep` takes it too.

`cli.py` reads the YAML. `trials.py` chooses, runs and shows trials.
"""
