"""Which run and which of its checkpoints are gone on from, and what may change in it."""

import os
from pathlib import Path
from typing import Any

import pytest
from lightning_mgpu.checkpoint_io import AtomicCheckpointIO
from lightning_mgpu.resume import changes, choose_checkpoint, claim, find_run, with_resumed_run


def test_a_run_that_goes_on_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    lock = claim(tmp_path)
    with pytest.raises(Exception, match="still running in another process"):
        claim(tmp_path)
    assert lock is not None
    os.close(lock)
    os.close(claim(tmp_path) or -1)


def test_last_is_the_run_worked_on_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("b", "c", "a")):
        directory = tmp_path / "runs" / name / "checkpoints"
        directory.mkdir(parents=True)
        (directory / "last.ckpt").touch()
        os.utime(directory / "last.ckpt", (i, i))
    (tmp_path / "runs" / "d").mkdir()
    assert find_run("last") == Path("runs/a")
    (tmp_path / "runs" / "a" / "config.yaml").write_text("")
    rest = ["--trainer.max_epochs=9"]
    expected = ["fit", "--config=runs/a/config.yaml", "--resume=runs/a", *rest]
    assert with_resumed_run(["fit", "--resume", "last", *rest]) == expected
    assert with_resumed_run(["fit", *rest]) == ["fit", *rest]


def test_changes() -> None:
    same = {"trainer": {"max_epochs": 1, "devices": 2}, "model": {"class_path": "A"}}
    longer = {**same, "trainer": {"max_epochs": 3, "devices": 2}}
    assert changes(Path("run"), same, same) == []
    assert changes(Path("run"), same, longer) == ["trainer.max_epochs 1 -> 3"]
    with pytest.raises(Exception, match="--model=B would make run another run, it has A"):
        changes(Path("run"), same, {**same, "model": {"class_path": "B"}})


def test_a_scaled_run_keeps_its_devices() -> None:
    run, scaled = Path("run"), {"scale_by_devices": True}
    before, longer, wider = (
        {"trainer": {"max_epochs": max_epochs, "devices": devices}, **scaled}
        for max_epochs, devices in ((1, 2), (2, 2), (1, 3))
    )
    assert changes(run, before, longer) == ["trainer.max_epochs 1 -> 2"]
    with pytest.raises(Exception, match=r"devices=3: with --scale_by_devices=true other"):
        changes(run, before, wider)


@pytest.mark.parametrize(
    "loops",
    [{}, {"fit_loop": {"epoch_progress": {}}}, {"fit_loop": None}, {"fit_loop": {"epoch_progress": {"current": 3}}}],
)
def test_a_checkpoint_that_lacks_its_progress_is_damaged(loops: dict[str, Any], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    whole = {"fit_loop": {"epoch_progress": {"current": {"processed": 1}}}}
    state = {"state_dict": {}, "optimizer_states": [], "global_step": 30}
    AtomicCheckpointIO().save_checkpoint({**state, "loops": whole}, checkpoints / "previous.ckpt")
    AtomicCheckpointIO().save_checkpoint({**state, "loops": loops}, checkpoints / "last.ckpt")
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged: going on from previous\.ckpt"):
        assert choose_checkpoint(tmp_path, max_epochs=3) == checkpoints / "previous.ckpt"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["last.ckpt.damaged", "previous.ckpt"]


def test_checkpoints_ahead_are_removed(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    loops = {"fit_loop": {"epoch_progress": {"current": {"processed": 1}}}}
    state = {"state_dict": {}, "optimizer_states": [], "global_step": 30, "loops": loops}
    for name in ("last.ckpt", "epoch=0-step=30.ckpt", "epoch=1-step=60.ckpt"):
        AtomicCheckpointIO().save_checkpoint(state, checkpoints / name)
    assert choose_checkpoint(tmp_path) == checkpoints / "last.ckpt"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["epoch=0-step=30.ckpt", "last.ckpt"]
