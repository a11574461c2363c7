"""One run, one directory: how it is made, recorded, stopped and resumed.

| file                 | what is in it                                                           |
| -------------------- | ----------------------------------------------------------------------- |
| `directory.py`       | the run directory: its name, its lock                                   |
| `record.py`          | what a run writes before training, and its last lines                   |
| `run_json.py`        | `run.json`: what a run was given, where it ran, how it ended            |
| `best_checkpoint.py` | the checkpoint of the best epoch, which `fit` tests                     |
| `last_checkpoint.py` | `last.ckpt`, from which a run goes on                                   |
| `checkpoint_file.py` | reading a checkpoint, without code; its configuration, nested and flat  |
| `resume.py`          | `--resume`: which run, which checkpoint, which flags may change         |
| `csv_logger.py`      | `metrics.csv`                                                           |
| `wandb_run.py`       | the Weights & Biases run                                                |
"""
