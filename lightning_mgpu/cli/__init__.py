"""The command line. `python -m lightning_mgpu fit` stops at, in this order:

|  # | file                 | function                            | what happens there             |
| -- | -------------------- | ----------------------------------- | ------------------------------ |
|  1 | `main.py`            | main                                | the subcommand is found        |
|  2 | `options.py`         | read_options                        | flags over files over defaults |
|  3 | `training_cli.py`    | TrainingCLI                         | LightningCLI parses them       |
|  4 | `checks.py`          | check_options                       | what is wrong ends here        |
|  5 | `directory.py`       | name_run_dir                        | where the run's files will be  |
|  6 | `training_cli.py`    | TrainingCLI.build                   | model, data, Trainer are built |
|  7 | `run_trainer.py`     | train                               | Trainer.fit                    |
|  8 | `record.py`          | RunRecord.setup                     | the directory and its loggers  |
|  9 | `last_checkpoint.py` | LastCheckpoint.on_train_epoch_start | per epoch: last.ckpt, a seed   |
| 10 | `run_trainer.py`     | summarize_training                  | the fingerprint of the weights |
| 11 | `run_trainer.py`     | test_best                           | the best checkpoint is tested  |
| 12 | `run_trainer.py`     | report                              | the last lines                 |

`run_trainer.py` says the same as a function; 8 and 9 are callbacks in `runs/`. Off this path stand
`help.py` (the subcommands, `--help`), `yaml_files.py` (`--config`), `parser.py` (a class that is
named has its own defaults), `error_messages.py` (a mistake ends in a few lines), and the commands
`export.py` and `list_runs.py`.
"""
