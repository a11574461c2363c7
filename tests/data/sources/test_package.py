"""The package of the distribution, from its real archive."""

from pathlib import Path

import pytest
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, ensure_fashion_mnist


@pytest.mark.slow
def test_package_through_apt_get(root: Path, raw: Path, tmp_path: Path) -> None:
    work = tmp_path / "a work directory"
    work.mkdir()
    try:
        unpacked = sources._unpack_package(work)
    except sources._Unavailable as error:
        pytest.skip(f"the distribution's archive cannot be had: {error}")
    ensure_fashion_mnist(root, "system", system_dir=unpacked)  # wrong bytes fail here
    assert all((raw / file.name).stat().st_size == file.num_bytes for file in FILES)
    assert len(FashionMNIST(root, download=False)) == 60_000
