"""Where the four Fashion-MNIST files come from: found or fetched, checked, and put where they are read.

    ensure_fashion_mnist("data")            # 'files under data/FashionMNIST/raw', or where else they came from

Every source answers one question, 'in which directory are the IDX files, plain or `.gz`?'. The rest is common to all:
read, check size and MD5, write beside the target, rename. Nothing unchecked ever bears a name that is read.
"""

import gzip
import hashlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock

logger = logging.getLogger(__name__)

Source = Literal["auto", "local", "system", "torchvision", "package"]


@dataclass(frozen=True)
class IdxFile:
    """An IDX file, known by the size and MD5 of its uncompressed bytes (compressors differ, these do not)."""

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
APT_SECONDS = 300.0  # 2 s on a fast line
FETCH = f"""
mkdir -p lists/partial cache/archives/partial
set -- -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o Debug::NoLocking=1 \\
    -o Acquire::Retries=0 -o Acquire::http::Timeout=8 -o Acquire::https::Timeout=8
apt-get "$@" update # one broken archive fails it
apt-get "$@" download {PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb unpacked
"""


class DataSourceError(RuntimeError):
    """The data cannot be had: what to do, and in a line each what was tried and why it failed."""


class _Unavailable(Exception):
    """One source has nothing for us; the next may."""


def ensure_fashion_mnist(
    root: str | Path, source: Source = "auto", *, files: Sequence[IdxFile] = FILES, system_dir: Path = SYSTEM_DIR
) -> str:
    """Put the Fashion-MNIST files, checked, under `{root}/FashionMNIST/raw` and say in a phrase where they came from.

    Good files already there are always used first. `auto` then tries, in this order: `local` (`.gz` files beside them),
    `system` (the installed Debian package), `torchvision` (its mirrors), `package` (the Debian archive through
    `apt-get`, without root). Damaged files are named in a warning and replaced. Safe to call from several processes.

    Raises:
        DataSourceError: no source has the files, or `root` cannot be written.
    """
    if source not in get_args(Source):
        raise DataSourceError(f"unknown data source {source!r}: choose one of {', '.join(get_args(Source))}")
    raw = Path(root).expanduser() / "FashionMNIST" / "raw"  # as torchvision has them
    if all(_is_good(raw / file.name, file) for file in files):
        return f"files under {raw}"  # the everyday case writes nothing, so `root` may be read-only
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(raw / ".lock"):
            return _collect(raw, source, files, system_dir)
    except OSError as error:
        raise DataSourceError(
            f"cannot write under {raw}: {error.strerror or error}; choose a data directory that can be written"
        ) from error


def _collect(raw: Path, source: Source, files: Sequence[IdxFile], system_dir: Path) -> str:
    """Go through the sources until every file is in `raw`; returns the last one's phrase."""
    sources: dict[str, tuple[str, Callable[[Path], Path]]] = {  # the functions get an empty directory to work in
        "local": (f"files under {raw}", lambda work: raw),
        "system": (f"Debian package {PACKAGE} ({system_dir})", lambda work: system_dir),
        "torchvision": ("torchvision download", lambda work: _download(files, work)),
        "package": (f"{PACKAGE} through apt-get", _unpack_package),
    }
    failures = []
    for name in sources if source == "auto" else dict.fromkeys(("local", source)):
        phrase, find_directory = sources[name]
        try:
            with tempfile.TemporaryDirectory() as work:
                directory = find_directory(Path(work))
                for file in files:
                    _adopt(directory, file, raw)
            return phrase
        except _Unavailable as error:
            failures.append(f"{name}: {error}")
    fix = (
        f"Fashion-MNIST not found. Install it with `apt-get install {PACKAGE}`, or put the four files under {raw}, or "
        "try --data.source=synthetic for a demonstration. Tried were"
    )
    raise DataSourceError("\n".join([fix, *failures]))


def _adopt(directory: Path, file: IdxFile, raw: Path) -> None:
    """Bring a file, which may be there already, from `directory`, plain or gzipped, into `raw`."""
    target = raw / file.name
    if _is_good(target, file):
        return
    found = [path for path in (directory / file.name, directory / f"{file.name}.gz") if path.exists()]
    for path in found:
        try:
            data = _read(path, file)
        except _Unavailable as error:
            logger.warning("%s %s; it is not used", path, error)
            if path == found[-1]:
                raise _Unavailable(f"{directory}: {path.name} {error}") from error
            continue
        part = raw / f".{file.name}.part"
        part.write_bytes(data)
        os.replace(part, target)
        return
    raise _Unavailable(f"{directory}: no {file.name}")


def _read(path: Path, file: IdxFile) -> bytes:
    """The checked, uncompressed bytes; raises `_Unavailable` for any others."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _Unavailable(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if (len(data), md5) != (file.num_bytes, file.md5):
        raise _Unavailable(f"has {len(data)} bytes with MD5 {md5}, not {file.num_bytes} with {file.md5}")
    return data


def _is_good(path: Path, file: IdxFile) -> bool:
    try:
        return bool(_read(path, file))
    except _Unavailable:
        return False


def _download(files: Sequence[IdxFile], work: Path) -> Path:
    """Download the files from torchvision's mirrors, with torchvision's progress bar."""
    from torchvision.datasets import FashionMNIST
    from torchvision.datasets.utils import download_url

    failures, before = [], socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)  # torchvision has none
    try:
        for mirror in FashionMNIST.mirrors:
            print(f"Downloading Fashion-MNIST from {mirror}", file=sys.stderr, flush=True)
            try:
                for file in files:
                    download_url(f"{mirror}{file.name}.gz", work)
                return work
            except (OSError, RuntimeError, HTTPException) as error:
                failures.append(f"{mirror}: {' '.join(str(error).split())}")
    finally:
        socket.setdefaulttimeout(before)
    raise _Unavailable("; ".join(failures))


def _unpack_package(work: Path) -> Path:
    """Fetch the Debian package into `work` and unpack it there: needs neither root nor the system's package lists."""
    print(f"Fetching {PACKAGE} (31 MB) with apt-get", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            ["sh", "-c", FETCH],
            cwd=work,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,  # nothing can ask
            capture_output=True,
            text=True,
            timeout=APT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _Unavailable(str(error)) from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "sh:"))]
        raise _Unavailable("; ".join(complaints[:3]) or f"{PACKAGE} cannot be unpacked")
    return work / "unpacked" / SYSTEM_DIR.relative_to("/")
