"""Checkpoints: torn, flipped, foreign, of other shapes; none runs code, none is loaded as something it is not."""

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore")
LIMITS = tuple(f"--trainer.limit_{stage}_batches=1" for stage in ("train", "val", "test"))
RUN = ("--data.val_size=101", "--trainer.accelerator=cpu", *LIMITS)


@pytest.fixture
def checkpoint(ends: Callable, main: Callable, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of LeNet's after an epoch of one batch, made once."""
    path = tmp_path_factory.getbasetemp() / "good.ckpt"
    if not path.exists():
        assert main("fit", f"--data.root={root}", *RUN, "--trainer.max_epochs=1", "--run_dir=made") == 0
        Path("made/checkpoints/last.ckpt").rename(path)
        shutil.rmtree("made")
    return path


class Pwned:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("subcommand", ["test", "fit"])
@pytest.mark.parametrize("place", ["all", "state_dict", "hyper_parameters", "callbacks", "old format", "bare pickle"])
def test_foreign_classes_are_refused_unread(
    ends: Callable, checkpoint: Path, tmp_path: Path, place: str, subcommand: str
) -> None:
    good = torch.load(checkpoint, weights_only=True)
    evil = Pwned(str(tmp_path / "pwned"))
    content = {**good, place: {**good[place], "net.0.weight": evil}} if place in good else evil
    if place == "bare pickle":
        (tmp_path / "evil.ckpt").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=place != "old format")
    assert "cannot be read" in ends(subcommand, "--ckpt_path=evil.ckpt", "--data.source=synthetic").error
    assert not (tmp_path / "pwned").exists()
    if place == "all":  # the trap works
        torch.load(tmp_path / "evil.ckpt", weights_only=False)
        assert (tmp_path / "pwned").exists()


@settings(max_examples=12)
@given(st.data())
def test_changed_bytes(ends: Callable, checkpoint: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Torn at any byte, or with a bit flipped: refused, or every tensor is what was saved."""
    good = checkpoint.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 8))
    torn = good[:at] + (bytes([good[at] ^ (1 << bit)]) + good[at + 1 :] if bit < 8 else b"")
    (tmp_path / "torn.ckpt").write_bytes(torn)
    outcome = ends("test", "--ckpt_path=torn.ckpt", "--data.source=synthetic", "--trainer.accelerator=cpu")
    if outcome.config is not None:
        before, after = (torch.load(path, weights_only=True) for path in (checkpoint, tmp_path / "torn.ckpt"))
        assert before.keys() == after.keys() and before["state_dict"].keys() == after["state_dict"].keys()
        for name, tensor in before["state_dict"].items():
            assert tensor.equal(after["state_dict"][name]), f"byte {at}, bit {bit}: {name} is another"


NOTHING = object()
WRONG = (NOTHING, None, 3, "x", [], {}, {"x": 1}, torch.zeros(2), float("nan"), -1)
PLACES = (
    *(("state_dict",), ("state_dict", "net.0.weight"), ("state_dict", "net.0.bias"), ("state_dict", "extra")),
    *(("hyper_parameters",), ("hyper_parameters", "_class_path"), ("hyper_parameters", "_instantiator")),
    *(("hyper_parameters", "num_classes"), ("hyper_parameters", "optimizer"), ("hyper_parameters", "extra")),
    *(("epoch",), ("global_step",), ("loops",), ("loops", "fit_loop"), ("callbacks",), ("optimizer_states",)),
    *(("lr_schedulers",), ("pytorch-lightning_version",), ("extra",)),
)


def changed(checkpoint: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    new = copy.deepcopy(checkpoint)
    parent: Any = new
    for key in place[:-1]:
        parent = parent[key]
    if value is NOTHING:
        parent.pop(place[-1], None)
    else:
        parent[place[-1]] = value
    return new


@settings(max_examples=8)
@example(place=("loops", "fit_loop"), value=3, subcommand="fit")
@example(place=("loops",), value=NOTHING, subcommand="fit")
@example(place=("optimizer_states",), value=NOTHING, subcommand="fit")  # save_weights_only
@given(st.sampled_from(PLACES), st.sampled_from(WRONG), st.sampled_from(["test", "fit"]))
def test_changed_contents(
    ends: Callable, root: Path, checkpoint: Path, tmp_path: Path, place: tuple[str, ...], value: Any, subcommand: str
) -> None:
    torch.save(changed(torch.load(checkpoint, weights_only=True), place, value), tmp_path / "changed.ckpt")
    more = ("--trainer.max_epochs=2",) if subcommand == "fit" else ()
    ends(subcommand, f"--data.root={root}", *RUN, *more, "--ckpt_path=changed.ckpt", runs=True)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("net.0.weight", torch.full((20, 1, 3, 3), float("nan")), "net.0.weight holds NaN"),
        ("net.0.weight", torch.zeros(20, 1, 5, 5), "first in net.0.weight"),
        ("net.11.weight", torch.zeros(3), "first in net.11.weight"),
        ("net.0.weight", NOTHING, "first in net.0.weight"),
    ],
)
def test_wrong_weights(
    ends: Callable, root: Path, checkpoint: Path, tmp_path: Path, name: str, tensor: Any, said: str
) -> None:
    torch.save(changed(torch.load(checkpoint, weights_only=True), ("state_dict", name), tensor), tmp_path / "x.ckpt")
    assert said in ends("test", f"--data.root={root}", *RUN, "--ckpt_path=x.ckpt", runs=True).error


def test_everything_loads_weights_only(
    ends: Callable, root: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked = torch.load, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    for subcommand in ("test", "validate", "predict", "fit"):
        args = (subcommand, f"--data.root={root}", *RUN, f"--ckpt_path={checkpoint}")
        assert not ends(*args, *(["--trainer.max_epochs=2"] if subcommand == "fit" else []), runs=True).error
    assert len(asked) >= 8 and None not in asked[:8] and False not in asked, asked
