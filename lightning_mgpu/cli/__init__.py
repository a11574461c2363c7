"""The command line. `main.py` finds the subcommand, `options.py` lays flags over files.

For `fit`, `training_cli.py` parses them, makes model, data and Trainer, trains, tests the best
epoch and prints the last lines. What stays of a run is written by the callbacks in `runs/`.
"""
