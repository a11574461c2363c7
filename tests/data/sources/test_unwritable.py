"""Places that cannot be written."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_mgpu.data.sources import DataSourceError


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may write anywhere, so step down for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file permissions")
@pytest.mark.parametrize("part", ["root", "raw"])
def test_unwritable_root_is_one_line_with_its_path(part: str, system_dir: Path, ensure: Callable) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's tmp_path cannot be entered by another user
        root = Path(directory)
        raw = root / "FashionMNIST" / "raw"
        locked = raw if part == "raw" else root
        locked.mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        locked.chmod(0o555)
        try:
            with as_ordinary_user(), pytest.raises(DataSourceError) as caught:
                ensure(root, system_dir=system_dir)
        finally:
            locked.chmod(0o755)
    assert str(raw) in str(caught.value) and "Permission denied" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file permissions")
def test_read_only_root_with_good_files_is_fine(put: Callable, ensure: Callable) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        raw = put(root / "FashionMNIST" / "raw")
        for path in (root, raw):
            path.chmod(0o555)
        try:
            with as_ordinary_user():
                assert ensure(root) == f"files under {raw}"
        finally:
            for path in (root, raw):
                path.chmod(0o755)


@pytest.mark.parametrize("part", ["", "FashionMNIST"])
def test_file_in_the_place_of_a_directory(part: str, root: Path, system_dir: Path, ensure: Callable) -> None:
    place = root / part
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("a file")
    with pytest.raises(DataSourceError, match=re.escape(str(root))):
        ensure(root, system_dir=system_dir)
    assert place.read_text() == "a file"
