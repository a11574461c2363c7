"""One run, one directory: how it is made, recorded, stopped and resumed.

| file             | what is in it                                                               |
| ---------------- | --------------------------------------------------------------------------- |
| `directory.py`   | the run directory: its name, its lock, what its files say                   |
| `record.py`      | config.yaml, run.json, model.txt and error.log; the loggers' start and end  |
| `checkpoints.py` | whole files; the best epoch; last.ckpt, from which a run goes on            |
| `resume.py`      | `--resume`: which checkpoint, and which options may change                  |
| `metrics.py`     | metrics.csv, which a resumed run goes on with                               |
| `wandb_run.py`   | the Weights & Biases run: online, offline or off                            |
"""
