"""Exchanges from the command line: a function's dotted path, and the help."""

import pytest

FIT = (
    *("fit", "--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.max_epochs=3"),
    *("--model.optimizer=AdamW", "--trainer.limit_train_batches=7", "--output.test=false"),
    *("--trainer.limit_val_batches=2", "--output.curve=false"),
)
MINE = """
def my_half(X, state):
    return sum(each.to(X.dtype) for each in (yield X.half()))
"""


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
