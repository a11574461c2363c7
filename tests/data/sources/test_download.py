"""torchvision's download, from a server on this machine."""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from torchvision.datasets import FashionMNIST

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, DataSourceError

NAMES = [file.name for file in FILES]
IMAGES = FILES[0].name


@contextmanager
def serving(handler: Callable[..., SimpleHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable) -> Iterator[Path]:
    directory = put(tmp_path / "mirror", zipped=True)
    md5s = {name: hashlib.md5((directory / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES}
    with serving(partial(SimpleHTTPRequestHandler, directory=str(directory))) as url:
        monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/", url])  # the second one answers
        monkeypatch.setattr(FashionMNIST, "resources", [(f"{name}.gz", md5) for name, md5 in md5s.items()])
        yield directory


@pytest.mark.usefixtures("mirror")
def test_torchvision_download(root: Path, ensure: Callable, assert_complete: Callable) -> None:
    assert ensure(root) == "torchvision download"
    assert_complete(root)
    assert socket.getdefaulttimeout() is None


def test_interrupted_download_is_refused(mirror: Path, root: Path, raw: Path, ensure: Callable) -> None:
    zipped = mirror / f"{IMAGES}.gz"
    zipped.write_bytes(zipped.read_bytes()[:-30])
    with pytest.raises(DataSourceError, match=r"torchvision \(.*corrupted"):
        ensure(root, "torchvision")
    assert not (raw / IMAGES).exists()


def test_silent_mirror_is_given_up_within_seconds(
    root: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable
) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"])
        start = time.monotonic()
        with pytest.raises(DataSourceError, match=r"torchvision \(.*(timed out|no answer)"):
            ensure(root, "torchvision")
        assert time.monotonic() - start < 20


class _StallingHandler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"the first bytes")
        time.sleep(60)


def test_mirror_that_stalls_midway_is_given_up_within_seconds(
    root: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable
) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.3)
    with serving(_StallingHandler) as url:
        monkeypatch.setattr(FashionMNIST, "mirrors", [url])
        start = time.monotonic()
        with pytest.raises(DataSourceError, match=r"torchvision \(.*timed out"):
            ensure(root, "torchvision")
        assert time.monotonic() - start < 20


def test_silent_name_server_is_given_up_within_seconds(
    root: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable
) -> None:
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.2)

    def resolve(*_: object, **__: object) -> None:
        time.sleep(60)
        raise socket.gaierror("at last")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    start = time.monotonic()
    with pytest.raises(DataSourceError, match=r"no answer in 0\.2 s"):
        ensure(root, "torchvision")
    assert time.monotonic() - start < 20
