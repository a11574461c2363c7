"""What is there already is used, and what is not is filled in once."""

from collections.abc import Callable
from pathlib import Path

import pytest


def test_good_local_files_are_used_and_nothing_is_written(
    root: Path, raw: Path, caplog: pytest.LogCaptureFixture, put: Callable, ensure: Callable
) -> None:
    put(raw)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in raw.iterdir())
    assert ensure(root) == f"files under {raw}"
    assert sorted((path.name, path.stat().st_mtime_ns) for path in raw.iterdir()) == before
    assert not caplog.records


def test_gz_files_beside_are_unpacked(
    root: Path, raw: Path, put: Callable, ensure: Callable, assert_complete: Callable
) -> None:
    put(raw, zipped=True)
    assert ensure(root, "local") == f"files under {raw}"
    assert_complete(root)


def test_fresh_root_is_filled_from_the_installed_package_once(
    root: Path, raw: Path, system_dir: Path, ensure: Callable, assert_complete: Callable
) -> None:
    assert ensure(root, system_dir=system_dir) == f"Debian package dataset-fashion-mnist ({system_dir})"
    assert_complete(root)
    assert ensure(root, system_dir=system_dir) == f"files under {raw}"


def test_relative_root_and_home(
    tmp_path: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable, assert_complete: Callable
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ensure(Path("data"), system_dir=system_dir)
    ensure(Path("~/data"), system_dir=system_dir)
    assert_complete(tmp_path / "data")
    assert_complete(tmp_path / "home" / "data")
