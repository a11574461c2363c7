"""Checkpoints are whole or not there: what is cut short, damaged or no plain value is told."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_mgpu.checkpoint_io import AtomicCheckpointIO, keep_previous, read_checkpoint
from lightning_mgpu.errors import UsageError


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_checkpoint_cut_short_replaces_nothing(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"state_dict": {}, "global_step": 1}, path)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    keep_previous(path)
    with monkeypatch.context() as patch:
        patch.setattr("torch.save" if moment == "writing" else "os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"state_dict": {}, "global_step": 2}, path)
    for name in ("last.ckpt", "previous.ckpt"):
        checkpoint = read_checkpoint(tmp_path / name)
        assert checkpoint is not None and checkpoint["global_step"] == 1


def test_every_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.arange(1000.0)}, "global_step": 1}, path)
    whole = path.read_bytes()
    assert read_checkpoint(path) is not None
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_checkpoint(path) is None, size
    path.write_bytes(whole.replace(torch.arange(500.0, 502.0).numpy().tobytes(), b"\1" * 8))
    assert torch.load(path, weights_only=True) and read_checkpoint(path) is None  # torch alone would take it


def test_what_is_whole_but_no_plain_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    told = r"last\.ckpt cannot be read: it holds a pathlib\.(_local\.)?PosixPath"
    with pytest.warns(UserWarning, match=told):  # at once, not when the run is to go on
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "best": Path("x")}, path)
    with pytest.raises(UsageError, match=told):
        read_checkpoint(path)


def test_a_checkpoint_is_found_where_its_url_says(tmp_path: Path) -> None:
    io, url = AtomicCheckpointIO(), f"file://{tmp_path}/a/last.ckpt"
    io.save_checkpoint({"state_dict": {}}, url)
    assert read_checkpoint(tmp_path / "a" / "last.ckpt") == io.load_checkpoint(url) == {"state_dict": {}}
    io.save_checkpoint({"x": Path("x")}, "memory://last.ckpt")
    assert io.load_checkpoint("memory://last.ckpt", weights_only=False) == {"x": Path("x")}
    with pytest.raises(pickle.UnpicklingError):
        io.load_checkpoint("memory://last.ckpt", weights_only=True)
