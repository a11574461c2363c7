"""Options of a strategy, whose name stands on the command line or in a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml


@pytest.mark.parametrize("before", [(), ("--trainer.strategy=ddp",), ("--trainer.strategy", "dp")])
def test_a_strategy_of_a_file_takes_options(
    before: tuple[str, ...], main: Callable, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text("trainer: {strategy: manual_allreduce}\n")
    for config in ("--config=x.yaml", "--config=experiment/resnet18_2dev.yaml"):
        assert main("fit", *before, config, "--trainer.strategy.split=auto", "--print_config") == 0
        strategy = yaml.safe_load(capfd.readouterr().out)["trainer"]["strategy"]
        assert strategy["class_path"].endswith("ManualAllreduceStrategy") and strategy["init_args"]["split"] == "auto"
    assert main("fit", "--config", "trainer/ddp.yaml", "--trainer.strategy.static_graph=true", "--print_config") == 0
    strategy = yaml.safe_load(capfd.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("DDPStrategy")
    assert strategy["init_args"]["static_graph"] is True


@pytest.mark.parametrize("config", ["{a: ", "{a: 010}", "{a: 1, a: 2}", "{a: !!int x}", "{} x"])
def test_a_configuration_on_the_command_line_is_read_as_strictly(
    config: str, main: Callable, capfd: pytest.CaptureFixture
) -> None:
    assert main("fit", "--config", config) == 2
    err = capfd.readouterr().err
    assert (
        err.startswith(f"error: --config={config} cannot be read as YAML: ".replace("  ", " ")) and err.count("\n") == 1
    )
