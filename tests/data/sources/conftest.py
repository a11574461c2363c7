"""Tiny files in the real ones' format, the directories they are looked for in, and no network but in the slow test."""

import gzip
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, IdxFile, ensure_fashion_mnist


def idx_bytes(name: str) -> bytes:
    """An IDX file of 5 images or labels, in the format of the real ones."""
    shape = (5, 28, 28) if "images" in name else (5,)
    num_values = 5 * 28 * 28 if "images" in name else 5
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    return header + bytes((len(name) + i * i) % 10 for i in range(num_values))


_CONTENT = {file.name: idx_bytes(file.name) for file in FILES}
_TINY = tuple(IdxFile(name, len(data), hashlib.md5(data).hexdigest()) for name, data in _CONTENT.items())


def _put(directory: Path, *, zipped: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in _CONTENT.items():
        if zipped:
            (directory / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (directory / name).write_bytes(data)
    return directory


def _ensure(root: Path, source: str = "auto", system_dir: Path = Path("/nonexistent")) -> str:
    return ensure_fashion_mnist(root, source, files=_TINY, system_dir=system_dir)  # type: ignore[arg-type]


def _assert_complete(root: Path) -> None:
    raw = root / "FashionMNIST" / "raw"
    assert {name: (raw / name).read_bytes() for name in _CONTENT} == _CONTENT
    assert not list(raw.glob(f"{sources.PARTIAL}*"))
    for train in (True, False):
        assert len(FashionMNIST(root, train=train, download=False)) == 5


@pytest.fixture
def CONTENT() -> dict[str, bytes]:
    """What the tiny files hold, by their names."""
    return _CONTENT


@pytest.fixture
def TINY() -> tuple[IdxFile, ...]:
    """Their sizes and checksums."""
    return _TINY


@pytest.fixture
def put() -> Callable[..., Path]:
    """`put(directory, zipped=False)` writes them there."""
    return _put


@pytest.fixture
def ensure() -> Callable[..., str]:
    """`ensure_fashion_mnist` for them."""
    return _ensure


@pytest.fixture
def assert_complete() -> Callable[[Path], None]:
    """All of them are under a root and nothing is half written there; torchvision reads them."""
    return _assert_complete


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "my data"


@pytest.fixture
def raw(root: Path) -> Path:
    return root / "FashionMNIST" / "raw"


@pytest.fixture
def system_dir(tmp_path: Path) -> Path:
    return _put(tmp_path / "system", zipped=True)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def refuse(*_: object) -> Path:
        raise sources._Unavailable("no network in tests")

    if "slow" not in request.keywords:
        monkeypatch.setattr(sources, "_unpack_package", refuse)
        monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # the discard port: refuses at once
