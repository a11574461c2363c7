"""Measurements on your own machine: `python -m lightning_mgpu benchmark`, which is `cli.py`.

`plan.py` has what can be measured, `processes.py` a fresh process for every measurement. In such a
process `steps.py` times the steps of a Trainer or of a loop by hand, with the clock of `parts.py`,
`exchange.py` an allreduce alone, and `cost.py` the engine itself. `report.py` makes tables and
pictures. `time_to_accuracy.py` has the seconds until a test accuracy.
"""
