"""Header, lines, curve and seconds of all kinds of runs."""

import time

import pytest

from lightning_mgpu.allreduce import ring_allreduce
from lightning_mgpu.callbacks import RunOutput
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.metrics import MetricsFile
from lightning_mgpu.strategies import ManualAllreduceStrategy


@pytest.fixture
def trainer(make_trainer, tmp_path):
    def make(*callbacks, **options):
        (tmp_path / "metrics.csv").unlink(missing_ok=True)
        trainer = make_trainer(callbacks=[*callbacks], enable_checkpointing=True, **options)
        trainer.loggers = [MetricsFile(trainer, None)]
        return trainer

    return make


def test_a_header_then_one_line_per_epoch(make_data, trainer, capsys, tmp_path):
    output, data, model = RunOutput(), make_data(), LeNet()
    output.notes["wandb"] = "off"
    trainer(output, devices=3, strategy="dp", max_epochs=2).fit(model, data)
    epochs = capsys.readouterr().out.splitlines()
    shown = dict(line.split(":", 1) for line in (epochs.pop(0) for _ in range(6)))
    assert list(shown) == ["model", "strategy", "batch", "data", "run", "wandb"]
    assert "LeNet, 129,068 parameters, precision 32-true" in shown["model"]
    assert shown["strategy"].endswith(" on 3 x cpu")
    assert shown["batch"].strip() == "64 global, 21.3333 per replica"
    assert "402 train, 101 val, 107 test" in shown["data"]
    assert shown["run"].strip() == str(tmp_path)
    assert [line[:11] for line in epochs] == ["epoch 1/2  ", "epoch 2/2  "]
    assert all(line.endswith(" s") for line in epochs)
    names = ("train_loss", "train_acc", "val_loss", "val_acc")
    assert all(f"  {name} " in line for line in epochs for name in names)
    trainer(RunOutput(header=False)).test(model, data, verbose=False)
    assert capsys.readouterr().out == ""
    strategy = ManualAllreduceStrategy(ring_allreduce)
    trainer(RunOutput(), strategy=strategy).validate(model, data, verbose=False)
    assert "Strategy (ring_allreduce on gathered gradients) on" in capsys.readouterr().out


def test_seconds_are_of_training_only(make_data, trainer):
    class Sleeps(LeNet):
        def training_step(self, *args):
            time.sleep(0.05)
            return super().training_step(*args)

        def validation_step(self, *args):
            time.sleep(0.5)
            return super().validation_step(*args)

    output = RunOutput()
    trainer(output, val_check_interval=3, limit_train_batches=6).fit(Sleeps(), make_data())
    assert 0.3 <= output.seconds[0] < 2  # of 6 steps, without 4 batches of validation
