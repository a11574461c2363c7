"""The command line. `main.py` dispatches to a subcommand, `options.py` merges files and flags.

For `fit`, `training_cli.py` parses the options, builds model, data and Trainer, trains, tests the
best checkpoint and prints a summary. The callbacks in `runs/` write the files of a run.
"""
