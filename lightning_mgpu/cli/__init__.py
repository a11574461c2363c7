"""The command line: `main.py` dispatches, `options.py` merges files and flags, `training_cli.py`
builds model, data and Trainer, trains, and tests the best checkpoint.
"""
