"""Options become a configuration: files compose, classes have defaults, names are found."""

import re

import pytest
import yaml

from lightning_mgpu.cli import help as cli_help
from lightning_mgpu.cli.help import short_help, subcommands
from lightning_mgpu.cli.main import INFO
from lightning_mgpu.cli.yaml_files import config_dirs
from lightning_mgpu.tools import RANGES

CONFIGS = config_dirs()[-1]


@pytest.fixture
def config(main, capfd):
    def config(*args):
        assert main(*args, "--print_config") == 0, capfd.readouterr().err
        return yaml.safe_load(capfd.readouterr().out)

    return config


def test_configurations_compose(config, tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_epochs: 3\n  devices: 5\n")
    shipped = ("--config", "model/resnet18.yaml", "--config=experiment/resnet18_book.yaml")
    fast = ("--config=trainer/cpu_bf16.yaml",)
    early = "--trainer.max_epochs=9"
    found = config("fit", early, "-c", "mine.yaml", *shipped, *fast, "--data.batch_size", "32")
    assert found["model"]["class_path"].endswith("ResNet18")
    assert found["model"]["init_args"]["channels_last"]
    # the later file wins, over a flag as well
    assert found["trainer"]["max_epochs"] == 3 and found["trainer"]["devices"] == 1
    assert found["data"]["init_args"]["batch_size"] == 32 and found["seed_everything"] == 42


def test_a_file_of_lightnings_own_cli(config, tmp_path):
    """It has null for what is left out. A flag beside it, or before it, counts."""
    nulls = "optimizer: null\nlr_scheduler: null\nweights_only: null\nweights: null\nmodel: null\n"
    (tmp_path / "old.yaml").write_text(f"{nulls}seed_everything: 3\n")
    found = config("fit", "--run_dir=a", "--config=old.yaml", "--model.lr=0.3")
    assert found["model"]["init_args"]["lr"] == 0.3 and found["seed_everything"] == 3
    assert found["run_dir"] == "a"


DEFAULTS = {
    ("--model.lr=0.3",): (0.3, None, {}),
    ("--model.lr=0.3", "--model=ResNet18"): (0.3, None, {}),
    ("--model.optimizer=AdamW",): (None, "AdamW", {"lr": 0.001, "weight_decay": 0.01}),
    ("--model.optimizer=SGD", "--model.optimizer.momentum=0.9", "--model.optimizer.lr=1"): (
        *(None, "SGD"),
        {"lr": 1.0, "momentum": 0.9},
    ),
}


@pytest.mark.parametrize("args", DEFAULTS, ids=" ".join)
def test_a_class_that_is_named_has_its_own_defaults(args, config):
    lr, name, values = DEFAULTS[args]
    found = config("fit", *args)["model"]["init_args"]
    optimizer = found["optimizer"] or {"class_path": ".None", "init_args": {}}
    assert found["lr"] == lr and optimizer["class_path"].endswith(f".{name}")
    assert {key: optimizer["init_args"][key] for key in values} == values


def test_a_strategy_by_its_name_takes_options(config, tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {strategy: manual_allreduce_ring}\n")
    for args in (("--trainer.strategy=manual_allreduce_ring",), ("--config=mine.yaml",)):
        found = config("fit", *args, "--trainer.strategy.replicas=3")["trainer"]["strategy"]
        assert found["class_path"].endswith("ManualAllreduceStrategy")
        assert found["init_args"]["replicas"] == 3
        assert found["init_args"]["allreduce"].endswith("ring_allreduce")
    for line, (name, path) in {
        "manual_allreduce --trainer.strategy.allreduce=tree": ("allreduce", "tree_allreduce"),
        "manual_allreduce --trainer.strategy.allreduce=math.fsum": ("allreduce", "math.fsum"),
    }.items():
        found = config("fit", *f"--trainer.strategy={line}".split())["trainer"]["strategy"]
        assert found["init_args"][name].endswith(path)
    assert config("fit", "--trainer.strategy=ddp")["trainer"]["strategy"] == "ddp"
    own = "--trainer.strategy=lightning.pytorch.strategies.SingleDeviceStrategy"
    found = config("fit", own)["trainer"]["strategy"]
    assert found["class_path"].endswith(".SingleDeviceStrategy")


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_shipped_config_parses_and_names_its_command(path, config):
    content, name = yaml.safe_load(path.read_text()), str(path.relative_to(CONFIGS))
    specs = content.get("parameters", {})
    trial = [f"--{key}={[*specs[key].get('values', specs[key].values())][-1]}" for key in specs]
    config("fit", *(trial or ("--config", name)))
    command = "sweep" if specs else "fit"
    given = "" if name == "default.yaml" else f".* --config {name}"
    line = rf"^#   python -m lightning_mgpu {command}\b{given}"
    assert re.search(line, path.read_text(), re.MULTILINE)


def test_help_shows_the_options_people_use_first(main, capfd):
    text = str(short_help(["fit", "--help"]))
    assert text.count("\n") <= 25 and max(map(len, text.splitlines())) <= 120
    assert str(short_help([])).startswith("usage: ")
    assert re.search("\n  runs  ", str(short_help(["--help"])))
    for args, word in {
        ("fit", "--help"): "--trainer.devices N",
        ("fit", "--help.all"): "--trainer.gradient_clip_val",
        ("fit", "--trainer.strategy.help=ManualAllreduceStrategy"): "--trainer.strategy.replicas",
        ("fit", "--trainer.strategy=manual_allreduce", "--trainer.strategy.help"): "y.replicas",
        ("fit", "--model=ResNet18", "--model.help"): "--model.in_channels",
        ("fit", "--data.help"): "--data.crop_padding",
    }.items():
        capfd.readouterr()
        assert main(*args) == 0
        assert word in capfd.readouterr().out, args


def test_help_does_not_wait_for_torch(command):
    for line in (("--version",), ("--help",), ("fit", "--help")):
        process = command.start(*line, launcher=("-X", "importtime", "-m", "lightning_mgpu"))
        status, out, err = command.finish(process, timeout=60)
        assert status == 0 and "python -m lightning_mgpu" in out
        assert "lightning_mgpu.cli.main" in err and "torch" not in err


@pytest.mark.parametrize("module", ["no_such_directory.cli", "no_such_file"])
def test_what_was_deleted_is_not_offered(module, monkeypatch):
    monkeypatch.setitem(cli_help.TOOLS, "gone", f"lightning_mgpu.{module}:command")
    assert {"fit", "runs"} <= {*subcommands()} and "gone" not in subcommands()


def test_a_limit_of_one_batch_is_told():
    """Lightning's line says that 1 is a batch; that 1.0 is all batches need not be said."""
    said = "`Trainer(limit_train_batches={})` was configured so"
    assert INFO.match(said.format(1.0)) and not INFO.match(said.format(1))


CLASSES = {  # an option that only some classes have
    "model.optimizer.": "--model.optimizer=SGD",
    "trainer.strategy.outer": "--trainer.strategy=exchange_diloco",
    "trainer.strategy.options": "--trainer.strategy=exchange_top_k",
}


@pytest.mark.parametrize("option", RANGES)
def test_ranges_name_options_that_exist(option, main, capfd):
    """A renamed option would have no range, without a word."""
    is_fit = option.split(".")[0] in ("data", "model", "seed_everything", "trainer")
    if not is_fit and not cli_help.TOOLS.keys() <= {*subcommands()}:
        pytest.skip("a subcommand was deleted")
    words = [word for name, word in CLASSES.items() if option.startswith(name)]
    tools = {"count": "sweep", "mb": "trace", "repeats": "benchmark", "num_steps": "benchmark"}
    tool = "fit" if is_fit else tools.get(option, "network" if option != "devices" else "trace")
    needed = {"fit": words, "network": ["--csv=x.csv"], "trace": ["ring"], "sweep": ["--config=x"]}
    end = ["fit"] if tool == "network" else []
    assert main(tool, *needed.get(tool, []), f"--{option}=-5", *end) == 2
    assert f"--{option}=-5" in (text := capfd.readouterr().err) and "must be a number from" in text


OLD_NAMES = {
    ("fit", "--trainer.strategy=exchange_sign"): "exchange_sign is called exchange_ef_sign now",
    ("fit", "--trainer.strategy=dp", "--trainer.strategy.split=[1]"): "split is called --trainer",
    (
        "fit",
        "--trainer.strategy=exchange_diloco",
        "--trainer.strategy.every=2",
    ): "called --trainer.strategy.sync_every",
    ("fit", "-c", "old.yaml"): "delay is called --trainer.strategy.sync_delay now",
    ("fit", "--resume=old"): "outer is called --trainer.strategy.outer_step now",
    ("allreduce", "ring"): "no subcommand 'allreduce': allreduce is called trace now",
    ("network", "--slow=1,2", "fit"): "--slow is called --slowdown now",
    ("network", "--faster", "2", "fit"): "--faster is called --speedup now",
}


@pytest.mark.parametrize("args", OLD_NAMES, ids=" ".join)
def test_names_of_earlier_versions(args, main, capfd, tmp_path):
    strategy = {"class_path": "lightning_mgpu.exchanges.LocalSGDStrategy"}
    configs = {
        "old.yaml": {"trainer": {"strategy": strategy | {"init_args": {"delay": 1}}}},
        "old/config.yaml": {
            "model": {"class_path": "LeNet"},
            "data": {"class_path": "FashionMNIST"},
            "trainer": {"strategy": strategy | {"init_args": {"outer": None}}},
        },
    }
    (tmp_path / "old").mkdir()
    for name, content in configs.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    if args[0] == "network" and "network" not in subcommands():
        pytest.skip("network was deleted")
    assert main(*args) == 2
    assert OLD_NAMES[args] in capfd.readouterr().err
