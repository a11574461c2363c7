"""Files: found, fetched, checked; damaged, half written, altered ones are named and replaced."""

import fcntl
import gzip
import hashlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, DataSourceError, IdxFile, ensure_fashion_mnist

NAMES = [file.name for file in FILES]
IMAGES = NAMES[0]
CONTENT = {name: bytes(100 + i) for i, name in enumerate(NAMES)}
TINY = tuple(
    IdxFile(name, len(data), hashlib.md5(data).hexdigest()) for name, data in CONTENT.items()
)
NOWHERE = Path("/nonexistent")
unpack_package = sources._unpack_package  # the fixture below takes its place
ensure: Callable[..., str] = partial(ensure_fashion_mnist, files=TINY, system_dir=NOWHERE)


def put(directory: Path, zipped: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in CONTENT.items():
        (directory / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(data) if zipped else data
        )
    return directory


def assert_complete(raw: Path) -> None:
    """All files are there, and none is half written."""
    assert {name: (raw / name).read_bytes() for name in NAMES} == CONTENT
    assert not [path for path in raw.iterdir() if path.suffix == ".part"]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "FashionMNIST" / "raw"


@pytest.fixture
def system_dir(tmp_path: Path) -> Path:
    return put(tmp_path / "system", zipped=True)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise sources._Unavailable("no network in tests")

    monkeypatch.setattr(sources, "_unpack_package", refuse)
    # the discard port: refuses at once
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])


def test_a_fresh_root_is_filled_once_and_read_from_then_on(
    tmp_path: Path, raw: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ensure(tmp_path, system_dir=system_dir) == f"files under {system_dir}"
    assert_complete(raw)
    assert ensure(tmp_path) == f"files under {raw}"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    put(home := tmp_path / "home" / "data" / "FashionMNIST" / "raw", zipped=True)
    assert ensure("~/data", "local") == f"files under {home}"
    assert_complete(home)


def test_a_damaged_file_is_named_and_replaced_or_refused(
    tmp_path: Path, raw: Path, system_dir: Path
) -> None:
    good, altered = CONTENT[IMAGES], CONTENT[IMAGES][:-1] + b"\1"
    with_md5 = r"has 100 bytes with MD5 \w+, not 100 with \w+"
    for content, said in (
        (good[:50], "has 50 bytes"),
        (good + b"\0", "has 101 bytes"),
        (altered, with_md5),
    ):
        (put(raw) / IMAGES).write_bytes(content)
        with pytest.raises(DataSourceError, match=rf"local: {raw}/{IMAGES} {said}"):
            ensure(tmp_path, "local")
        assert ensure(tmp_path, system_dir=system_dir) == f"files under {system_dir}"
        assert_complete(raw)


def test_torchvisions_download_an_interrupted_and_an_altered_one(
    tmp_path: Path, raw: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(url: str, directory: Path) -> None:
        name = url.removeprefix("http://127.0.0.1:9/")
        (directory / name).write_bytes(change((system_dir / name).read_bytes()))

    monkeypatch.setattr(sources, "download_url", download)
    for change, said in (  # noqa: B007 (`download` uses it)
        (lambda content: content[:-10], "cannot be read"),
        (lambda content: b"<html>", "cannot be read"),
        (lambda content: gzip.compress(bytes(99) + b"\1"), "has 100 bytes with MD5"),
    ):
        with pytest.raises(DataSourceError, match=rf"torchvision: .*{IMAGES}.gz {said}"):
            ensure(tmp_path, "torchvision")
        assert not (raw / IMAGES).exists()
    change = bytes
    assert ensure(tmp_path) == "torchvision download"
    assert_complete(raw)


def test_a_silent_mirror_is_given_up_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        monkeypatch.setattr(
            FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"]
        )
        with pytest.raises(DataSourceError, match=r"torchvision: .*timed out"):
            ensure(tmp_path, "torchvision")
    assert socket.getdefaulttimeout() is None


@pytest.mark.slow
def test_package_through_apt_get(tmp_path: Path, raw: Path) -> None:
    work = tmp_path / "a work directory"
    work.mkdir()
    try:
        unpacked = unpack_package(work)
    except sources._Unavailable as error:
        pytest.skip(f"the distribution's archive cannot be had: {error}")
    ensure_fashion_mnist(tmp_path, "local", system_dir=unpacked)  # wrong bytes fail here
    assert all((raw / file.name).stat().st_size == file.num_bytes for file in FILES)


def test_where_nothing_is_found_or_can_be_written(
    tmp_path: Path, raw: Path, system_dir: Path
) -> None:
    with pytest.raises(DataSourceError) as caught:
        ensure(tmp_path)
    fix, *tried = str(caught.value).splitlines()
    for part in ("apt-get install dataset-fashion-mnist", str(raw), "--data.source=synthetic"):
        assert part in fix
    assert [line.split(":")[0] for line in tried] == ["local", "local", "torchvision", "package"]
    (tmp_path / "a_file").touch()
    with pytest.raises(
        DataSourceError, match=f"cannot write under {tmp_path / 'a_file'}/.*Not a directory"
    ):
        ensure(tmp_path / "a_file", system_dir=system_dir)


def test_killed_while_writing_then_several_at_once(
    tmp_path: Path, raw: Path, system_dir: Path
) -> None:
    put(raw)
    # what a process killed before the renaming leaves
    (raw / IMAGES).rename(raw / f".{IMAGES}.part")
    with ThreadPoolExecutor() as pool:  # the lock holds between threads as between processes
        with (raw / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            two = [pool.submit(ensure, tmp_path, system_dir=system_dir) for _ in range(2)]
            with pytest.raises(TimeoutError):
                two[0].result(timeout=0.1)
        said = sorted(one.result() for one in two)
    assert said == sorted([f"files under {system_dir}", f"files under {raw}"])
    assert_complete(raw)
