"""Eleven promises, checked for any strategy: `python -m lightning_mgpu.testing STRATEGY`.

`cases.py` has the training runs that show them, of the modules in `probe.py`. `check.py` starts
each in processes of its own.
"""

from lightning_mgpu.testing.check import check_strategy as check_strategy
