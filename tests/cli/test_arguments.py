"""Options become a configuration: files compose, classes have defaults, names are found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mgpu.cli import help as cli_help
from lightning_mgpu.cli import options
from lightning_mgpu.cli.help import OPTIONS, short_help, subcommands
from lightning_mgpu.project import find_configs

CONFIGS = find_configs("lightning_mgpu")
Config = Callable[..., dict[str, Any]]


@pytest.fixture
def config(main: Callable, capfd: pytest.CaptureFixture) -> Config:
    """The configuration that a command line comes to."""

    def config(*args: str) -> dict[str, Any]:
        assert main(*args, "--print_config") == 0, capfd.readouterr().err
        return yaml.safe_load(capfd.readouterr().out)

    return config


def test_configurations_compose(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_epochs: 3\n  devices: 5\n")
    shipped = ("--config", "model/resnet18.yaml", "--config=experiment/resnet18_book.yaml")
    found = config("fit", "-c", "mine.yaml", *shipped, "--data.batch_size", "32")
    assert found["model"]["class_path"].endswith("ResNet18")
    # the later file wins
    assert found["trainer"]["max_epochs"] == 3 and found["trainer"]["devices"] == 1
    assert found["data"]["init_args"]["batch_size"] == 32 and found["seed_everything"] == 42
    (tmp_path / "model.yaml").write_text("class_path: ResNet18\ninit_args: {num_classes: 12}\n")
    model = config("fit", "--model", "model.yaml", "--model.optimizer=AdamW")["model"]
    assert model["class_path"].endswith("ResNet18") and model["init_args"]["num_classes"] == 12
    assert model["init_args"]["optimizer"]["class_path"].endswith("AdamW")


DEFAULTS = {
    ("--model=ResNet18",): {"lr": 0.1, "weight_decay": 0},
    ("--config=experiment/resnet18_book.yaml", "--model.optimizer.momentum=0.9"): {
        "lr": 0.1,
        "momentum": 0.9,
    },
    ("--model.optimizer.momentum=0.9",): {"lr": 0.2, "momentum": 0.9},
    ("--model.optimizer.weight_decay=0.1", "--model.optimizer=AdamW"): {
        "lr": 0.001,
        "weight_decay": 0.1,
    },
    ("--model=ResNet18", "--model.optimizer=AdamW", "--model.optimizer.lr=0.1"): {
        "lr": 0.1,
        "weight_decay": 0.01,
    },
}


@pytest.mark.parametrize("args", DEFAULTS, ids=" ".join)
def test_a_class_that_is_named_has_its_own_defaults(args: tuple[str, ...], config: Config) -> None:
    optimizer = config("fit", *args)["model"]["init_args"]["optimizer"]["init_args"]
    assert {name: optimizer[name] for name in DEFAULTS[args]} == DEFAULTS[args]


@pytest.mark.parametrize("defaults", [{}, {"model": None, "data": None}], ids=str)
def test_a_project_without_defaults(
    defaults: dict[str, Any], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "read_default_config", lambda: defaults)
    found = config("fit", "--model=ResNet18", "--data=FashionMNIST")
    assert found["model"]["class_path"].endswith("ResNet18")
    assert found["data"]["class_path"].endswith("FashionMNIST")


def test_a_default_that_is_a_kind_of_text(config: Config) -> None:
    assert config("fit", "--trainer.callbacks=Timer")["trainer"]["callbacks"] == {
        "class_path": "lightning.pytorch.callbacks.Timer",
        "init_args": {"duration": None, "interval": "step", "verbose": True},
    }


OWN = """
import pickle
from collections.abc import Callable, Iterable
from functools import partial

from lightning.pytorch import Callback, LightningModule
from torch.optim import Optimizer, SGD

from lightning_mgpu.models import LeNet

Make = Callable[[Iterable], Optimizer]

class Several(LeNet):
    def __init__(self, one: Make, several: list[Make], named: dict[str, Make]) -> None:
        for made in (one, *several, *named.values()):
            assert type(made) is partial and made.func is SGD and made.keywords["lr"] == 0.3
            pickle.dumps(made)
        super().__init__(one)
"""


def test_classes_get_plain_partials(main: Callable, tmp_path: Path) -> None:
    """Any class on the command line can be copied and pickled, to be sent to processes."""
    (tmp_path / "own_partials.py").write_text(OWN)
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.3}}
    init = {"one": sgd, "several": [sgd, sgd], "named": {"a": sgd}}
    model = {"class_path": "own_partials.Several", "init_args": init}
    quick = ("--data.source=synthetic", "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu")
    assert (
        main(
            "fit",
            f"--config={yaml.safe_dump({'model': model}, default_flow_style=True)}",
            *quick,
            "--trainer.devices=1",
        )
        == 0
    )


def test_a_strategy_by_its_name_takes_options(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer: {strategy: manual_allreduce_ring}\n")
    for args in (("--trainer.strategy=manual_allreduce_ring",), ("--config=mine.yaml",)):
        found = config("fit", *args, "--trainer.strategy.replicas=3")["trainer"]["strategy"]
        assert (
            found["class_path"].endswith("ManualAllreduceStrategy")
            and found["init_args"]["replicas"] == 3
        )
        assert found["init_args"]["allreduce"].endswith("ring_allreduce")
    ddp = "{class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {static_graph: true}}"
    found = config("fit", f"--trainer.strategy={ddp}", "--trainer.strategy.init_sync=false")
    assert found["trainer"]["strategy"]["init_args"]["static_graph"]
    assert not found["trainer"]["strategy"]["init_args"]["init_sync"]
    assert config("fit", "--trainer.strategy=ddp")["trainer"]["strategy"] == "ddp"
    name = "lightning.pytorch.strategies.SingleDeviceStrategy"
    assert config("fit", f"--trainer.strategy={name}")["trainer"]["strategy"]["class_path"] == name


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_shipped_config_parses_and_names_its_command(path: Path, config: Config) -> None:
    if "parameters" not in yaml.safe_load(path.read_text()):  # a sweep's
        config("fit", "--config", str(path.relative_to(CONFIGS)))
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(
        command in line
        for line in comment
        for command in ("lightning_mgpu fit", "lightning_mgpu sweep")
    )


def test_help_shows_the_options_people_use_first(
    main: Callable, capfd: pytest.CaptureFixture
) -> None:
    text = short_help(["fit", "--help"])
    assert (
        text
        and text.count("\n") <= 24
        and len(OPTIONS) == 15
        and max(map(len, text.splitlines())) <= 120
    )
    assert short_help([]).startswith("usage: ") and "export" in short_help(["--help"])  # type: ignore[union-attr]
    for args, word in {
        ("fit", "--help"): "--trainer.devices N",
        ("fit", "--help.all"): "--trainer.gradient_clip_val",
        ("fit", "--trainer.strategy.help", "manual_allreduce"): "--trainer.strategy.replicas",
        ("fit", "--model.help"): "--model.init",
        ("fit", "--model=ResNet18", "--model.help"): "--model.in_channels",
        ("fit", "--data.help"): "--data.cutout",
    }.items():
        capfd.readouterr()
        assert main(*args) == 0
        assert word in capfd.readouterr().out, args


def test_a_directory_that_was_deleted_is_not_offered(
    main: Callable, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setitem(cli_help.TOOLS, "gone", "lightning_mgpu.no_such_directory.cli.command")
    assert {"fit", "export"} <= {*subcommands()} and "gone" not in subcommands()
    assert main("gone") == 2
    assert "no subcommand 'gone'" in capfd.readouterr().err
