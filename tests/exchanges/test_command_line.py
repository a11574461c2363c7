"""Exchanges from the command line: killed and resumed, and as a function's dotted path."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

FIT = (
    *("fit", "--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.max_epochs=3"),
    *("--model.optimizer=AdamW", "--trainer.limit_train_batches=7", "--output.test=false"),
    *("--trainer.limit_val_batches=2", "--output.curve=false"),
)
MINE = """
def my_half(X, state):
    return sum(each.to(X.dtype) for each in (yield X.half()))
"""


def last(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


KILLER = """
import os, signal
from lightning.pytorch import Callback

class Killer(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if os.environ.get("KILL") and (trainer.current_epoch, batch_idx) == (1, 6):
            os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_resumed(command, tmp_path):
    """While differences are under way.

    There are states of the exchange, of the outer step, and of the optimizers of each process.
    """
    (tmp_path / "killer.py").write_text(KILLER)
    diloco = ("=exchange_diloco", ".sync_every=5", ".sync_delay=2")
    top_k = ".exchange=lightning_mgpu.exchanges.top_k"
    options = ("--trainer.strategy" + each for each in (*diloco, top_k))
    line = (*FIT, "--trainer.devices=2", "--trainer.callbacks=killer.Killer", *options)
    code, out, err = command(*line, "--run_dir=whole", timeout=200)
    assert code == 0 and "exchange: " in out, f"{out}\n{err}"
    process = command.start(*line, "--run_dir=killed", KILL="1")
    code, out, err = command.finish(process, timeout=200)
    assert code == -signal.SIGKILL and "epoch 1/" in out and "epoch 2/" not in out, err
    code, out, err = command("fit", "--resume=killed", timeout=200)
    assert code == 0 and "epoch 1/" not in out, f"{out}\n{err}"
    whole, killed = (last(tmp_path / name) for name in ("whole", "killed"))
    assert whole["exchange_states"]["num_bytes"] == killed["exchange"]["num_bytes"]
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, killed["state_dict"][name]), name


@pytest.mark.slow
def test_ones_own(main, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(MINE)
    one = ("--trainer.devices=1", "--trainer.max_epochs=1")
    mine = ("--trainer.strategy=exchange", "--trainer.strategy.exchange=mine.my_half")
    assert main(*FIT, *one, *mine, "--run_dir=run") == 0
    out = capfd.readouterr().out
    assert "exchange: 1.81 MB per replica by my_half, 3.61 by the exact sum" in out
    assert "1.806952" in (tmp_path / "run" / "metrics.csv").read_text()
    wrong = "--trainer.strategy.options={fraction: 0.1}"
    assert main(*FIT, *one, *mine, wrong) == 2
    err = capfd.readouterr().err
    assert "exchange mine.my_half with torch.float32: TypeError: my_half() got an unexp" in err


def test_help_has_the_defaults_of_a_name(main, capfd):
    assert main("fit", "--trainer.strategy.help=exchange_diloco") == 0
    assert "sync_every=16 outer_lr=0.7" in capfd.readouterr().out
