"""A shipped sweep trains with what W&B's agent starts: the agent's own functions make the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import wandb
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from lightning_mgpu.cli.yaml_files import CONFIGS

SHORT = {"data.source": "synthetic", "trainer.max_epochs": 1, "trainer.accelerator": "cpu", "trainer.devices": 1}
SHORT |= {f"trainer.limit_{part}_batches": 1 for part in ("train", "val", "test")}
ARGS = {"model.optimizer.lr": 0.0625, "run_dir": "run", "wandb.mode": "offline", **SHORT}


@pytest.mark.filterwarnings("ignore:data.source=synthetic")
def test_what_the_agent_starts(main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: {"value": value} for name, value in ARGS.items()}
    save_config_file_from_dict("wandb/given.yaml", given)
    agents = {"SWEEP_ID": "abcd1234", "RUN_ID": "run45678", "SWEEP_PARAM_PATH": "wandb/given.yaml", "API_KEY": "0" * 40}
    monkeypatch.delenv("WANDB_MODE")
    for name, value in agents.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it reads the environment anew
    sweep = yaml.safe_load((CONFIGS / "sweep" / "lenet_lr.yaml").read_text())
    *start, args = create_sweep_command(sweep["command"])
    assert start[:3] == ["python", "-m", "lightning_mgpu"] and args == "${args}"
    assert main(*start[3:], *create_sweep_command_args({"args": given})["args"]) == 0
    wandb.teardown()  # all is written
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == ARGS["model.optimizer.lr"]
    logged = (tmp_path / "run" / "metrics.csv").read_text()
    assert "val_acc" in logged and "test_acc" not in logged and not list((tmp_path / "run").glob("*.png"))  # a trial
    # the run is the one the agent named, and knows its sweep
    [recorded] = (tmp_path / "run" / "wandb").glob("offline-run-*-run45678/*.wandb")
    assert b"abcd1234" in recorded.read_bytes()
