"""Files that are whole or not there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_mgpu.files import final_name, replace_text, replacing


@pytest.mark.parametrize("sync", [False, True])
def test_the_old_file_stands_until_the_new_one_is_whole(sync: bool, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("old")
    with replacing(path, sync=sync) as part:
        part.write_text("ne")
        assert path.read_text() == "old" and final_name(part) == "report.md"
        part.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_else(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as part:
            part.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_whoever_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    replace_text(path, "old")
    code = f"""
import os, signal
from pathlib import Path
from lightning_mgpu.files import replacing
with replacing(Path({str(path)!r})) as part:
    part.write_text("ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL and path.read_text() == "old"
    [left] = set(tmp_path.iterdir()) - {path}
    assert final_name(left) == "report.md"
    replace_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_only_unfinished_files_have_another_final_name() -> None:
    for name in ("last.ckpt", ".hidden", "a.part", "wandb"):
        assert final_name(Path("run") / name) == name
