"""`--config FILE fit`, as Lightning takes it: such a file has options of several subcommands, or options alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning_mgpu.arguments import with_subcommand_first

FIT = {
    "trainer": {"max_epochs": 3},
    "model": {"class_path": "ResNet18", "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": "3e-2"}}}},
}
TEST = {"trainer": {"devices": 1}}


@pytest.fixture
def config_of(tmp_path: Path, main: Callable, capfd: pytest.CaptureFixture) -> Callable[..., dict[str, Any]]:
    """The configuration that a command line comes to."""
    more: dict[str, Any] = {"fit": {"seed_everything": 5}, "predict": None}
    files: dict[str, Any] = {"both": {"fit": FIT, "test": TEST}, "one": {"fit": FIT}, "flat": FIT, "more": more}
    files["named"] = {"subcommand": "fit", **files["both"]}
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))

    def config_of(*args: str) -> dict[str, Any]:
        assert main(*args, "--print_config") == 0
        return yaml.safe_load(capfd.readouterr().out)  # type: ignore[no-any-return]

    return config_of


def test_it_comes_to_the_same_as_one_behind(config_of: Callable) -> None:
    expected = config_of("fit", "--config=flat.yaml", "--trainer.max_epochs=7")
    assert expected["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.03
    for before in ("--config both.yaml fit", "-c one.yaml fit", "--config=flat.yaml fit", "--config=one.yaml"):
        args = before.split()
        assert config_of(*args, "--trainer.max_epochs=7") == expected, args
    for either in ("fit --config both.yaml", "--config=named.yaml"):
        args = either.split()
        assert config_of(*args, "--trainer.max_epochs=7") == expected, args
    assert config_of("--config=both.yaml", "test")["trainer"]["devices"] == 1
    assert config_of("--config=more.yaml", "predict")["trainer"]["max_epochs"] == 10
    found = config_of("--config=both.yaml", "--config", "more.yaml", "fit", "--trainer.max_epochs=7")
    assert found == {**expected, "seed_everything": 5}


SAID = """
fit:
  trainer: parts/trainer.yaml
  model: {class_path: plain.Model, init_args: {note: "run 🚀", options: {3: .inf, x: 1e-3}, items: &many
    [[1], [2]]}}
  wandb: {mode: disabled}
  checkpoint:
<<: {test: {model: {class_path: plain.Model, init_args: {items: *many}}}}
validate:
"""
PLAIN = """
from typing import Any
from lightning.pytorch import LightningModule

class Model(LightningModule):
    def __init__(self, note: str = "", options: dict[Any, Any] | None = None, items: list[Any] | None = None):
        super().__init__()
"""


def test_a_section_says_what_its_file_says(
    main: Callable, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "here" / "parts").mkdir(parents=True)
    (tmp_path / "here" / "parts" / "trainer.yaml").write_text("max_epochs: 3\n")
    (tmp_path / "here" / "said.yaml").write_text(SAID)
    lines = SAID[: SAID.index("<<:")].replace("&many", "").splitlines()[2:]
    (tmp_path / "here" / "flat.yaml").write_text("\n".join(line.removeprefix("  ") for line in lines))
    found = []
    for args in (("--config=here/said.yaml", "fit"), ("fit", "--config=here/flat.yaml")):
        assert main(*args, "--print_config") == 0
        found.append(yaml.safe_load(capfd.readouterr().out))
    assert found[0] == found[1]
    model = found[0]["model"]["init_args"]
    assert (model["note"], model["options"], model["items"]) == ("run 🚀", {3: float("inf"), "x": 0.001}, [[1], [2]])
    assert found[0]["trainer"]["max_epochs"] == 3
    assert main("--config=here/said.yaml", "test", "--print_config") == 0
    assert yaml.safe_load(capfd.readouterr().out)["model"]["init_args"]["items"] == [[1], [2]]
    assert main("--config=here/said.yaml", "validate", "--print_config") == 0


def test_checkpoints_and_runs_bring_their_configuration(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    data = {"class_path": "FashionMNIST", "init_args": {"root": str(root), "val_size": 101}}
    brief = {"accelerator": "cpu", "devices": 1, "limit_train_batches": 1}
    model = {"class_path": "LeNet", "init_args": {"optimizer": {"class_path": "Adam", "init_args": {"lr": 0.001}}}}
    own = {"trainer": {**brief, "max_epochs": 1}, "data": data, "model": model, "wandb": {"mode": "disabled"}}
    trained, tested = {"fit": own}, {"test": {"trainer": brief, "data": data, "wandb": {"mode": "disabled"}}}
    (tmp_path / "trained.yaml").write_text(yaml.safe_dump(trained))
    (tmp_path / "tested.yaml").write_text(yaml.safe_dump(tested))
    (tmp_path / "longer.yaml").write_text("fit: {trainer: {max_epochs: 2}}\n")
    assert main("--config=trained.yaml", "--run_dir=run") == 0
    assert main("--config=tested.yaml", "test", "--ckpt_path=run/checkpoints/last.ckpt", "--run_dir=again") == 0
    found = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert found["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.Adam"  # the checkpoint's
    capfd.readouterr()
    assert main("--config=longer.yaml", "fit", "--resume=run") == 0
    assert "\nepoch 2/2" in capfd.readouterr().out


def test_what_has_no_config_first_is_left_alone() -> None:
    for args in ([], ["fit"], ["fit", "--config", "x.yaml"], ["--help"], ["--trainer.devices=2", "fit"], ["sweep"]):
        assert with_subcommand_first(args) == args
