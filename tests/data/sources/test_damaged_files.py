"""What is damaged is named and replaced, and never used."""

import gzip
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, DataSourceError

NAMES = [file.name for file in FILES]
IMAGES = FILES[0].name
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "too long": lambda data: data + b"\0",
    "altered": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_named_and_replaced(
    name: str,
    damage: Callable[[bytes], bytes],
    root: Path,
    system_dir: Path,
    caplog: pytest.LogCaptureFixture,
    raw: Path,
    put: Callable,
    ensure: Callable,
    assert_complete: Callable,
    CONTENT: dict[str, bytes],
) -> None:
    put(raw)
    (raw / name).write_bytes(damage(CONTENT[name]))
    phrase = ensure(root, system_dir=system_dir)
    assert phrase == f"files under {raw} and Debian package dataset-fashion-mnist ({system_dir})"
    assert_complete(root)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(raw / name) in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_without_another_source_is_refused(
    damage: str, root: Path, raw: Path, put: Callable, ensure: Callable, CONTENT: dict[str, bytes]
) -> None:
    put(raw)
    (raw / IMAGES).write_bytes(DAMAGE[damage](CONTENT[IMAGES]))
    wrong = r"MD5 \w+, not \w+" if damage == "altered" else rf"(more|only \d+) bytes, not {len(CONTENT[IMAGES])}"
    with pytest.raises(DataSourceError, match=rf"local \({re.escape(str(raw))}: {IMAGES} has {wrong}"):
        ensure(root, "local")


@pytest.mark.parametrize("zipped", [lambda data: gzip.compress(data)[:-20], lambda data: b"<html>", DAMAGE["altered"]])
def test_damaged_gz_is_passed_over(
    zipped: Callable[[bytes], bytes],
    root: Path,
    raw: Path,
    system_dir: Path,
    caplog: pytest.LogCaptureFixture,
    put: Callable,
    ensure: Callable,
    assert_complete: Callable,
    CONTENT: dict[str, bytes],
) -> None:
    put(raw, zipped=True)
    (raw / f"{IMAGES}.gz").write_bytes(zipped(CONTENT[IMAGES]))
    assert "Debian package" in ensure(root, system_dir=system_dir)
    assert_complete(root)
    assert f"{IMAGES}.gz cannot be read" in caplog.text


def test_altered_contents_of_the_installed_package_are_refused(
    root: Path, raw: Path, system_dir: Path, ensure: Callable, CONTENT: dict[str, bytes]
) -> None:
    (system_dir / f"{IMAGES}.gz").write_bytes(gzip.compress(DAMAGE["altered"](CONTENT[IMAGES])))
    with pytest.raises(DataSourceError, match=rf"system \(.*{IMAGES}.gz has MD5 \w+, not \w+"):
        ensure(root, "system", system_dir)
    assert not (raw / IMAGES).exists()


def test_leftovers_of_a_killed_run_are_removed_and_never_used(
    root: Path,
    raw: Path,
    system_dir: Path,
    put: Callable,
    ensure: Callable,
    assert_complete: Callable,
    CONTENT: dict[str, bytes],
) -> None:
    leftover = raw / f"{sources.PARTIAL}abc"
    put(leftover)
    (leftover / f"{IMAGES}.new").write_bytes(CONTENT[IMAGES][:50])
    with pytest.raises(DataSourceError):
        ensure(root, "local")
    assert not leftover.exists()
    ensure(root, system_dir=system_dir)
    assert_complete(root)


def test_the_cache_of_an_old_torchvision_is_refused(root: Path, raw: Path, put: Callable, ensure: Callable) -> None:
    put(raw)
    processed = raw.parent / "processed"
    processed.mkdir()
    for name in ("training.pt", "test.pt"):
        (processed / name).touch()
    with pytest.raises(DataSourceError, match="remove it"):
        ensure(root)
