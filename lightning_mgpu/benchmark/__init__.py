"""Measurements on your own machine: `python -m lightning_mgpu benchmark`, which is `cli.py`.

`rounds.py` starts a fresh process for every measurement of training steps. In it, `worker.py` times
a Trainer or a loop by hand. `exchange.py` times the allreduce functions alone, and `report.py`
makes tables.
"""
