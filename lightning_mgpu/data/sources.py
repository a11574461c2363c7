"""Where the four Fashion-MNIST files come from: found or fetched, checked, put where they are read.

    ensure_fashion_mnist("data")  # 'files under data/FashionMNIST/raw', or where they came from

Every source answers one question, 'in which directory are the IDX files, plain or `.gz`?'. The rest
is the same for all: read, check size and MD5, write beside the target, rename. So a file under a
name that is read has always been checked.
"""

import fcntl
import gzip
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from torchvision.datasets import FashionMNIST
from torchvision.datasets.utils import download_url


class IdxFile(NamedTuple):
    """An IDX file, known by size and MD5 uncompressed (compressors differ, these do not)."""

    name: str
    num_bytes: int
    md5: str


FILES = (
    IdxFile("train-images-idx3-ubyte", 47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    IdxFile("train-labels-idx1-ubyte", 60_008, "9018921c3c673c538a1fc5bad174d6f9"),
    IdxFile("t10k-images-idx3-ubyte", 7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
    IdxFile("t10k-labels-idx1-ubyte", 10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
)
PACKAGE = "dataset-fashion-mnist"  # of Debian and Ubuntu
SYSTEM_DIR = Path("/usr/share/datasets/fashion-mnist")  # where that package puts the files
ANSWER_SECONDS = 8.0  # a server silent for longer is not there
FETCH = f"""
mkdir -p lists/partial cache/archives/partial
set -- -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o Debug::NoLocking=1 \\
    -o Acquire::Retries=0 -o Acquire::http::Timeout=8 -o Acquire::https::Timeout=8
apt-get "$@" update # one broken archive fails it
apt-get "$@" download {PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb unpacked
"""


class DataSourceError(RuntimeError):
    """No source has the data: what to do, then one line per source with the reason."""


class _Unavailable(Exception):
    """One source does not have the files; the next is tried."""


def ensure_fashion_mnist(
    root: str | Path,
    source: str = "auto",
    *,
    files: Sequence[IdxFile] = FILES,
    system_dir: Path = SYSTEM_DIR,
) -> str:
    """Put the checked files under `{root}/FashionMNIST/raw`; returns where they came from.

    Good files that are there already are used. Else `auto` tries, in this order: `local` (`.gz`
    files beside them, or the installed Debian package), `torchvision` (its mirror), `package` (the
    Debian archive through `apt-get`, without root). Damaged files are replaced. Several processes
    may call this at once.

    Raises:
        DataSourceError: If no source has the files, or `root` cannot be written.
    """
    raw = Path(root).expanduser() / "FashionMNIST" / "raw"  # as torchvision has them
    try:
        if all(_is_good(raw / file.name, file) for file in files):
            # the common case writes nothing, so `root` may be read-only
            return f"files under {raw}"
        raw.mkdir(parents=True, exist_ok=True)
        with (raw / ".lock").open("w") as lock, tempfile.TemporaryDirectory() as work:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for other processes and threads
            return _collect(raw, source, files, system_dir, Path(work))
    except OSError as error:
        raise DataSourceError(
            f"cannot write under {raw}: {error}; choose another with --data.root"
        ) from error


def _collect(raw: Path, source: str, files: Sequence[IdxFile], system_dir: Path, work: Path) -> str:
    """Try the sources until one has put every file into `raw`; returns its description."""
    sources: list[tuple[str, str, Callable[[], Path]]] = [  # name, description, gives a directory
        ("local", f"files under {raw}", lambda: raw),
        ("local", f"files under {system_dir}", lambda: system_dir),
        ("torchvision", "torchvision download", lambda: _download(files, work)),
        ("package", f"{PACKAGE} through apt-get", lambda: _unpack_package(work)),
    ]
    failures = []
    for name, description, find_directory in sources:
        if source not in ("auto", name):
            continue
        try:
            directory = find_directory()
            for file in files:
                unfinished = raw / f".{file.name}.part"
                unfinished.write_bytes(_checked(directory, file))
                os.replace(unfinished, raw / file.name)
            return description
        except _Unavailable as error:
            failures.append(f"{name}: {error}")
    fix = (
        f"Fashion-MNIST not found. Install it with `apt-get install {PACKAGE}`, or put the four "
        f"files under {raw}, or try --data.source=synthetic for a demonstration. With "
        f"data.source={source} were tried"
    )
    raise DataSourceError("\n".join([fix, *failures]))


def _checked(directory: Path, file: IdxFile) -> bytes:
    """The uncompressed bytes of a file in `directory`, plain or gzipped; else `_Unavailable`."""
    problem = f"{directory}: no {file.name}"
    for path in (directory / file.name, directory / f"{file.name}.gz"):
        if not path.exists():
            continue
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                data = stream.read()
        except (OSError, EOFError, zlib.error) as error:
            problem = f"{path} cannot be read ({error})"
            continue
        if (found := (len(data), _md5(data))) == (file.num_bytes, file.md5):
            return data
        problem = "{} has {} bytes with MD5 {}, not {} with {}".format(path, *found, *file[1:])
    raise _Unavailable(problem)


def _is_good(path: Path, file: IdxFile) -> bool:
    if not path.exists() or path.stat().st_size != file.num_bytes:
        return False
    return _md5(path.read_bytes()) == file.md5


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _download(files: Sequence[IdxFile], work: Path) -> Path:
    """Download the files from torchvision's mirror, with torchvision's progress bar."""
    mirror, previous = FashionMNIST.mirrors[0], socket.getdefaulttimeout()
    print(f"Downloading Fashion-MNIST from {mirror}", file=sys.stderr, flush=True)
    socket.setdefaulttimeout(ANSWER_SECONDS)  # torchvision would wait for ever
    try:
        for file in files:
            download_url(f"{mirror}{file.name}.gz", work)
    except (OSError, RuntimeError, HTTPException) as error:
        raise _Unavailable(f"{mirror}: {' '.join(str(error).split())}") from error
    finally:
        socket.setdefaulttimeout(previous)
    return work


def _unpack_package(work: Path) -> Path:
    """Fetch the Debian package into `work` and unpack it: needs no root and no package lists."""
    print(f"Fetching {PACKAGE} (31 MB) with apt-get", file=sys.stderr, flush=True)
    done = subprocess.run(
        ["sh", "-c", FETCH],
        cwd=work,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,  # no question can stop it
        capture_output=True,
        text=True,
    )
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "sh:"))]
        raise _Unavailable("; ".join(complaints[:3]) or f"{PACKAGE} cannot be unpacked")
    return work / "unpacked" / SYSTEM_DIR.relative_to("/")
