"""Files: found, fetched, checked; damaged and half written ones are replaced."""

import gzip
import hashlib
from pathlib import Path

import pytest
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, ensure_fashion_mnist

CONTENT = {name: bytes(100 + i) for i, name in enumerate(FILES)}
TINY = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}
IMAGES = next(iter(FILES))


@pytest.fixture
def system_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only source that is there: neither a mirror nor apt-get answers."""
    monkeypatch.setattr(sources, "SYSTEM_DIR", tmp_path / "system")
    monkeypatch.setattr(sources, "FETCH", "echo E: no archive >&2; exit 100")
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # refuses at once
    (tmp_path / "system").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "system" / f"{name}.gz").write_bytes(gzip.compress(content))
    return tmp_path / "system"


def test_damaged_files_are_replaced_and_good_ones_are_kept(
    tmp_path: Path, system_dir: Path
) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    for damaged in (b"", CONTENT[IMAGES][:50], CONTENT[IMAGES][:-1] + b"\1"):
        assert ensure_fashion_mnist(tmp_path, TINY) == f"files under {system_dir}"
        assert {name: (raw / name).read_bytes() for name in FILES} == CONTENT
        assert ensure_fashion_mnist(tmp_path, TINY) == f"files under {raw}"
        (raw / IMAGES).write_bytes(damaged)


def test_where_nothing_is_found_every_source_says_why(tmp_path: Path, system_dir: Path) -> None:
    (system_dir / f"{IMAGES}.gz").write_bytes(gzip.compress(bytes(99) + b"\1"))
    with pytest.raises(RuntimeError) as caught:
        ensure_fashion_mnist(tmp_path, TINY)
    fix, *tried = str(caught.value).splitlines()
    assert "apt-get install dataset-fashion-mnist" in fix and "--data.source=synthetic" in fix
    reasons = ("No such file", f"{IMAGES} is damaged", "Connection refused", "E: no archive")
    assert [reason in line for reason, line in zip(reasons, tried, strict=True)] == [True] * 4
    assert [path.name for path in (tmp_path / "FashionMNIST" / "raw").iterdir()] == [".lock"]
