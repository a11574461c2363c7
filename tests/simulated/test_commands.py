"""Every subcommand that starts no processes, on simulated devices."""

import pytest

LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test", "predict")]
SHORT = ("--data.source=synthetic", "--trainer.accelerator=sim", *LIMITS)
CKPT = "--ckpt_path=run/checkpoints/last.ckpt"
DP = ("--trainer.devices=2", "--trainer.strategy=dp", "--trainer.max_epochs=1")


@pytest.fixture
def on_sim(main, capfd):
    """Run a command line; returns what it prints."""

    def run(*args):
        assert main(*args) == 0
        return str(capfd.readouterr().out)

    return run


def test_fit_and_all_that_goes_on_from_its_checkpoint(on_sim):
    out = on_sim("fit", *SHORT, *DP, "--run_dir=run")
    assert "epoch 1/1" in out and "sim" in out
    for name in ("validate", "test", "predict"):
        assert "sim" in on_sim(name, *SHORT, CKPT, "--trainer.devices=1", f"--run_dir={name}")
    out = on_sim("fit", "--resume=run", "--trainer.max_epochs=2")
    assert "epoch 2/2" in out and "epoch 1/" not in out and "sim" in out
