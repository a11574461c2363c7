"""The files are found, fetched, checked and replaced; nothing damaged is ever used. No network but in the slow test."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from filelock import FileLock
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, DataSourceError, IdxFile, ensure_fashion_mnist


def idx_bytes(name: str) -> bytes:
    """An IDX file of 5 images or labels, in the format of the real ones."""
    shape = (5, 28, 28) if "images" in name else (5,)
    num_values = 5 * 28 * 28 if "images" in name else 5
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    return header + bytes((len(name) + i * i) % 10 for i in range(num_values))


CONTENT = {file.name: idx_bytes(file.name) for file in FILES}
TINY = tuple(IdxFile(name, len(data), hashlib.md5(data).hexdigest()) for name, data in CONTENT.items())
NAMES = list(CONTENT)
IMAGES = NAMES[0]


def put(directory: Path, *, zipped: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in CONTENT.items():
        if zipped:
            (directory / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (directory / name).write_bytes(data)
    return directory


def assert_complete(root: Path) -> None:
    raw = root / "FashionMNIST" / "raw"
    assert {name: (raw / name).read_bytes() for name in NAMES} == CONTENT
    assert not list(raw.glob(f"{sources.PARTIAL}*"))
    for train in (True, False):
        assert len(FashionMNIST(root, train=train, download=False)) == 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "my data"


@pytest.fixture
def raw(root: Path) -> Path:
    return root / "FashionMNIST" / "raw"


@pytest.fixture
def system_dir(tmp_path: Path) -> Path:
    return put(tmp_path / "system", zipped=True)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def refuse(*_: object) -> Path:
        raise sources._Unavailable("no network in tests")

    if "slow" not in request.keywords:
        monkeypatch.setattr(sources, "_unpack_package", refuse)
        monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # the discard port: refuses at once


def ensure(root: Path, source: str = "auto", system_dir: Path = Path("/nonexistent")) -> str:
    return ensure_fashion_mnist(root, source, files=TINY, system_dir=system_dir)  # type: ignore[arg-type]


# What is there already


def test_good_local_files_are_used_and_nothing_is_written(
    root: Path, raw: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(raw)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in raw.iterdir())
    assert ensure(root) == f"files under {raw}"
    assert sorted((path.name, path.stat().st_mtime_ns) for path in raw.iterdir()) == before
    assert not caplog.records


def test_gz_files_beside_are_unpacked(root: Path, raw: Path) -> None:
    put(raw, zipped=True)
    assert ensure(root, "local") == f"files under {raw}"
    assert_complete(root)


def test_fresh_root_is_filled_from_the_installed_package_once(root: Path, raw: Path, system_dir: Path) -> None:
    assert ensure(root, system_dir=system_dir) == f"Debian package dataset-fashion-mnist ({system_dir})"
    assert_complete(root)
    assert ensure(root, system_dir=system_dir) == f"files under {raw}"


def test_relative_root_and_home(tmp_path: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ensure(Path("data"), system_dir=system_dir)
    ensure(Path("~/data"), system_dir=system_dir)
    assert_complete(tmp_path / "data")
    assert_complete(tmp_path / "home" / "data")


# What is damaged


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
def test_damaged_file_without_another_source_is_refused(damage: str, root: Path, raw: Path) -> None:
    put(raw)
    (raw / IMAGES).write_bytes(DAMAGE[damage](CONTENT[IMAGES]))
    wrong = r"MD5 \w+, not \w+" if damage == "altered" else rf"(more|only \d+) bytes, not {len(CONTENT[IMAGES])}"
    with pytest.raises(DataSourceError, match=rf"local \({re.escape(str(raw))}: {IMAGES} has {wrong}"):
        ensure(root, "local")


@pytest.mark.parametrize("zipped", [lambda data: gzip.compress(data)[:-20], lambda data: b"<html>", DAMAGE["altered"]])
def test_damaged_gz_is_passed_over(
    zipped: Callable[[bytes], bytes], root: Path, raw: Path, system_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(raw, zipped=True)
    (raw / f"{IMAGES}.gz").write_bytes(zipped(CONTENT[IMAGES]))
    assert "Debian package" in ensure(root, system_dir=system_dir)
    assert_complete(root)
    assert f"{IMAGES}.gz cannot be read" in caplog.text


def test_altered_contents_of_the_installed_package_are_refused(root: Path, raw: Path, system_dir: Path) -> None:
    (system_dir / f"{IMAGES}.gz").write_bytes(gzip.compress(DAMAGE["altered"](CONTENT[IMAGES])))
    with pytest.raises(DataSourceError, match=rf"system \(.*{IMAGES}.gz has MD5 \w+, not \w+"):
        ensure(root, "system", system_dir)
    assert not (raw / IMAGES).exists()


def test_leftovers_of_a_killed_run_are_removed_and_never_used(root: Path, raw: Path, system_dir: Path) -> None:
    leftover = raw / f"{sources.PARTIAL}abc"
    put(leftover)
    (leftover / f"{IMAGES}.new").write_bytes(CONTENT[IMAGES][:50])
    with pytest.raises(DataSourceError):
        ensure(root, "local")
    assert not leftover.exists()
    ensure(root, system_dir=system_dir)
    assert_complete(root)


def test_the_cache_of_an_old_torchvision_is_refused(root: Path, raw: Path) -> None:
    put(raw)
    processed = raw.parent / "processed"
    processed.mkdir()
    for name in ("training.pt", "test.pt"):
        (processed / name).touch()
    with pytest.raises(DataSourceError, match="remove it"):
        ensure(root)


# Several processes, and killed ones. The child needs this one module, not the package with Lightning.

CHILD = """
import sys, time; from pathlib import Path
sys.path.append(sys.argv[1]); import sources
root, system_dir = map(Path, sys.argv[2:4])
files = tuple(sources.IdxFile(n, int(s), m) for n, s, m in zip(*[iter(sys.argv[5:])] * 3))
def stop(*_):
    print("stopped", flush=True); time.sleep(60)
def slow(*arguments, original=sources.os.replace):
    time.sleep(0.1); original(*arguments)
if sys.argv[4] == "slow": sources.os.replace = slow
elif sys.argv[4]: setattr(sources.os, sys.argv[4], stop)
print(sources.ensure_fashion_mnist(root, "system", files=files, system_dir=system_dir), flush=True)
"""


def child(root: Path, system_dir: Path, patch: str = "") -> subprocess.Popen[str]:
    table = [str(value) for file in TINY for value in (file.name, file.num_bytes, file.md5)]
    arguments = [str(Path(sources.__file__).parent), str(root), str(system_dir), patch, *table]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)


def test_processes_preparing_at_once_share_one_result(root: Path, raw: Path, system_dir: Path) -> None:
    children = [child(root, system_dir, "slow") for _ in range(3)]
    phrases = sorted(process.communicate(timeout=60)[0].strip() for process in children)
    package = f"Debian package dataset-fashion-mnist ({system_dir})"
    assert phrases == [package, f"files under {raw}", f"files under {raw}"]  # one worked, the others waited for it
    assert_complete(root)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_while_writing(moment: str, root: Path, raw: Path, system_dir: Path) -> None:
    process = child(root, system_dir, moment)
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert list(raw.glob(f"{sources.PARTIAL}*/*"))  # it was in the middle of writing
    assert not [name for name in NAMES if (raw / name).exists()]
    ensure(root, system_dir=system_dir)  # and the dead one's lock is free
    assert_complete(root)


def test_a_lock_held_for_too_long_is_an_error(root: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LOCK_SECONDS", 0.1)
    raw.mkdir(parents=True)
    with FileLock(raw / ".lock"), pytest.raises(DataSourceError, match=r"another process .*\.lock"):
        ensure(root)


# Places that cannot be written


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
def test_unwritable_root_is_one_line_with_its_path(part: str, system_dir: Path) -> None:
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
def test_read_only_root_with_good_files_is_fine() -> None:
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
def test_file_in_the_place_of_a_directory(part: str, root: Path, system_dir: Path) -> None:
    place = root / part
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("a file")
    with pytest.raises(DataSourceError, match=re.escape(str(root))):
        ensure(root, system_dir=system_dir)
    assert place.read_text() == "a file"


# The order of the sources, and the message when all of them fail


@pytest.mark.parametrize("winner", ["system", "torchvision", "package"])
def test_sources_are_tried_in_order(
    winner: str, root: Path, tmp_path: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, asked = ["system", "torchvision", "package"], []

    def fake(name: str) -> Path:
        asked.append(name)
        if name != winner:
            raise sources._Unavailable("not this one")
        return system_dir

    monkeypatch.setattr(sources, "_download", lambda files, work: fake("torchvision"))
    monkeypatch.setattr(sources, "_unpack_package", lambda work: fake("package"))
    phrase = ensure(root, system_dir=system_dir if winner == "system" else tmp_path / "nothing")
    assert asked == [name for name in order[: order.index(winner) + 1] if name != "system"]
    assert {"system": "Debian package", "torchvision": "torchvision download", "package": "apt-get"}[winner] in phrase
    assert_complete(root)


@pytest.mark.parametrize("source", ["local", "system", "torchvision", "package"])
def test_a_named_source_is_the_only_one_asked(
    source: str, root: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "system":
        system_dir = Path("/nonexistent")
    with pytest.raises(DataSourceError) as caught:
        ensure(root, source, system_dir)
    for other in {"system", "torchvision", "package"} - {source}:
        assert f"{other} (" not in str(caught.value)
    assert f"{source} (" in str(caught.value)


def test_nothing_available_is_one_line_with_every_attempt_and_the_fix(root: Path, raw: Path) -> None:
    with pytest.raises(DataSourceError) as caught:
        ensure(root)
    message = str(caught.value)
    attempts = [message.index(f"{name} (") for name in ("local", "system", "torchvision", "package")]
    assert attempts == sorted(attempts) and "\n" not in message
    for part in (f"no files in {raw}", "no files in /nonexistent", "127.0.0.1:9", "no network in tests"):  # the reasons
        assert part in message
    for part in ("apt-get install dataset-fashion-mnist", str(raw), "--data.source=synthetic"):  # the ways out
        assert part in message


def test_unknown_source_names_the_allowed_ones(root: Path) -> None:
    with pytest.raises(DataSourceError, match=r"'kaggle'.*auto, local, system, torchvision, package"):
        ensure(root, "kaggle")
    assert not root.exists()


# torchvision's download, from a server on this machine


@contextmanager
def serving(handler: Callable[..., SimpleHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = put(tmp_path / "mirror", zipped=True)
    md5s = {name: hashlib.md5((directory / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES}
    with serving(partial(SimpleHTTPRequestHandler, directory=str(directory))) as url:
        monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/", url])  # the second one answers
        monkeypatch.setattr(FashionMNIST, "resources", [(f"{name}.gz", md5) for name, md5 in md5s.items()])
        yield directory


@pytest.mark.usefixtures("mirror")
def test_torchvision_download(root: Path) -> None:
    assert ensure(root) == "torchvision download"
    assert_complete(root)
    assert socket.getdefaulttimeout() is None


def test_interrupted_download_is_refused(mirror: Path, root: Path, raw: Path) -> None:
    zipped = mirror / f"{IMAGES}.gz"
    zipped.write_bytes(zipped.read_bytes()[:-30])
    with pytest.raises(DataSourceError, match=r"torchvision \(.*corrupted"):
        ensure(root, "torchvision")
    assert not (raw / IMAGES).exists()


def test_silent_mirror_is_given_up_within_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"])
        start = time.monotonic()
        with pytest.raises(DataSourceError, match=r"torchvision \(.*(timed out|no answer)"):
            ensure(root, "torchvision")
        assert time.monotonic() - start < 5


class _StallingHandler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"the first bytes")
        time.sleep(3)


def test_mirror_that_stalls_midway_is_given_up_within_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.3)
    with serving(_StallingHandler) as url:
        monkeypatch.setattr(FashionMNIST, "mirrors", [url])
        start = time.monotonic()
        with pytest.raises(DataSourceError, match=r"torchvision \(.*timed out"):
            ensure(root, "torchvision")
        assert time.monotonic() - start < 2


def test_silent_name_server_is_given_up_within_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.2)

    def resolve(*_: object, **__: object) -> None:
        time.sleep(3)
        raise socket.gaierror("at last")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    start = time.monotonic()
    with pytest.raises(DataSourceError, match=r"no answer in 0\.2 s"):
        ensure(root, "torchvision")
    assert time.monotonic() - start < 2


# The real archive


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
