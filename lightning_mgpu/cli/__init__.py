"""The command line. `python -m lightning_mgpu fit` stops at, in this order:

|   | file                  | function                            | what happens there             |
| - | --------------------- | ----------------------------------- | ------------------------------ |
| 1 | `cli/main.py`         | main                                | the subcommand is found        |
| 2 | `cli/options.py`      | read_options                        | flags over files over defaults |
| 3 | `cli/training_cli.py` | TrainingCLI.build                   | model, data, Trainer are made  |
| 4 | `runs/record.py`      | RunRecord.setup                     | the directory and its loggers  |
| 5 | `runs/checkpoints.py` | LastCheckpoint.on_train_epoch_start | per epoch: last.ckpt, a seed   |
| 6 | `cli/training_cli.py` | TrainingCLI.report                  | test of the best, last lines   |
"""
