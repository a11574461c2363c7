"""One run, one directory: how it is made, recorded, stopped, resumed and exported.

| file                 | what is in it                                                                |
| -------------------- | ---------------------------------------------------------------------------- |
| `directory.py`       | the run directory: its name, its lock                                        |
| `record.py`          | what is written before training: `config.yaml`, `model.txt`                  |
| `last_checkpoint.py` | `last.ckpt`, from which a run goes on as if it had never stopped             |
| `best_checkpoint.py` | the checkpoint of the best epoch                                             |
| `checkpoint_file.py` | reading a checkpoint: whole, without code, with its model's configuration    |
| `resume.py`          | `--resume`: which run, which checkpoint, which flags may change              |
| `csv_logger.py`      | `metrics.csv`                                                                |
| `wandb_run.py`       | the Weights & Biases run                                                     |
| `export.py`          | ONNX and torch's exported program                                            |
| `closing_line.py`    | the fingerprint of the weights and the book's last line                      |

The others are small tools of these: `files.py`, `flatten.py`, `processes.py`, `devices.py`, `errors.py`.
"""
