"""Data files: torn, flipped, swapped, empty, of another kind; a run uses the right bytes or none."""

import gzip
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_mgpu.data.fashion_mnist
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.data.sources import DataSourceError, IdxFile, ensure_fashion_mnist

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def copy_of(tiny_files: tuple[Path, tuple[IdxFile, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A new copy of the tiny dataset, the only one there is, plain or gzipped."""
    root, files = tiny_files
    ensure = partial(ensure_fashion_mnist, files=files, system_dir=tmp_path / "none")
    monkeypatch.setattr(lightning_mgpu.data.fashion_mnist, "ensure_fashion_mnist", ensure)

    def copy(is_packed: bool) -> list[Path]:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        raw = tmp_path / "data" / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        paths = [raw / (file.name + ".gz" * is_packed) for file in files]
        for file, path in zip(files, paths):
            content = (root / "FashionMNIST" / "raw" / file.name).read_bytes()
            path.write_bytes(gzip.compress(content, 1) if is_packed else content)
        return paths

    return copy


def load(root: Path) -> list[bytes]:
    data = FashionMNIST(root=str(root), source="local", val_size=10)
    data.prepare_data()
    data.setup("fit")
    return [part.numpy().tobytes() for set_ in (data.train_set, data.test_set) for part in (set_.images, set_.labels)]


@given(st.data(), st.booleans(), st.integers(0, 3))
def test_changed_bytes(copy_of: Callable, tmp_path: Path, data: st.DataObject, is_packed: bool, which: int) -> None:
    path = copy_of(is_packed)[which]
    expected = load(tmp_path / "data")
    path = copy_of(is_packed)[which]
    good = path.read_bytes()
    at = data.draw(st.one_of(st.integers(0, 20), st.integers(0, len(good) - 1)))
    bit = data.draw(st.integers(0, 8))
    path.write_bytes(good[:at] + (bytes([good[at] ^ (1 << bit)]) + good[at + 1 :] if bit < 8 else b""))
    try:
        found: list[bytes] | str = load(tmp_path / "data")
    except DataSourceError as error:
        found = str(error)
    if isinstance(found, str):
        assert path.name in found and "\n" not in found
    else:
        assert found == expected  # a gzip header has bits that say nothing


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", ["swapped", "empty", "directory", "not gzip", "dangling link", "missing"])
def test_wrong_file(copy_of: Callable, ends: Callable, tmp_path: Path, kind: str, is_packed: bool) -> None:
    images, labels, *_ = copy_of(is_packed)
    if kind == "swapped":
        images.rename(tmp_path / "x")
        labels.rename(images)
        (tmp_path / "x").rename(labels)
    elif kind in ("empty", "not gzip"):
        images.write_bytes(b"" if kind == "empty" else b"plain")
    else:
        images.unlink()
        if kind == "directory":
            images.mkdir()
        elif kind == "dangling link":
            images.symlink_to(tmp_path / "nowhere")
    (tmp_path / "data/FashionMNIST/raw/.lock").touch()
    error = ends("fit", "--data.source=local", "--trainer.accelerator=cpu", runs=True).error
    assert "train-images-idx3-ubyte" in error and "--data.source=synthetic" in error


def test_an_unwritable_root(ends: Callable) -> None:
    error = ends("fit", "--data.source=local", "--trainer.accelerator=cpu", "--data.root=/proc/1/x", runs=True).error
    assert "cannot write under /proc/1/x" in error and "choose a data directory" in error
