"""Where the four Fashion-MNIST files come from: found or fetched, checked, and put where torchvision looks for them.

    ensure_fashion_mnist("data")            # 'files under data/FashionMNIST/raw', or where else they came from
    FashionMNIST("data", download=False)    # torchvision's dataset now finds checked files

Every source answers one question, 'in which directory are the IDX files, plain or `.gz`?'; the rest is common to all:
read, check size and MD5, write beside the target, rename. Nothing unchecked ever bears a name that torchvision reads.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Literal, get_args
from urllib.request import urlopen

from filelock import FileLock, Timeout
from rich.console import Console

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
PARTIAL = ".partial-"  # prefix of a run's working directory; what a killed run leaves behind
ANSWER_SECONDS = 8.0  # a mirror silent for longer is not there
APT_SECONDS = 300.0  # one apt-get command; 1 s and 0.7 s on a fast line
LOCK_SECONDS = 900.0  # longer than another process on a slow line needs


class DataSourceError(RuntimeError):
    """The data cannot be had: one line with what was tried, why it failed, and what to do."""


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
    raw = Path(root).expanduser() / "FashionMNIST" / "raw"
    processed = raw.parent / "processed"
    if all((processed / name).is_file() for name in ("training.pt", "test.pt")):
        raise DataSourceError(f"{processed} holds an old torchvision's files, which would be used unchecked: remove it")
    if all(_is_good(raw / file.name, file) for file in files):
        return f"files under {raw}"  # the everyday case writes nothing, so `root` may be read-only
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(raw / ".lock", timeout=LOCK_SECONDS):
            for stale in raw.glob(f"{PARTIAL}*"):  # we hold the lock: whoever made it is gone
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=raw) as work:
                return _collect(raw, Path(work), source, files, system_dir)
    except Timeout:
        raise DataSourceError(f"another process has held {raw / '.lock'} for {LOCK_SECONDS:.0f} s: see why") from None
    except OSError as error:
        raise DataSourceError(
            f"cannot write under {raw}: {error.strerror or error}; choose a data directory that can be written"
        ) from error


def _collect(raw: Path, work: Path, source: Source, files: Sequence[IdxFile], system_dir: Path) -> str:
    """Go through the sources until every file is in `raw`."""
    missing = list(files)
    sources: dict[str, tuple[str, Callable[[], Path]]] = {
        "local": (f"files under {raw}", lambda: raw),
        "system": (f"Debian package {PACKAGE} ({system_dir})", lambda: system_dir),
        "torchvision": ("torchvision download", lambda: _download(missing, work)),
        "package": (f"{PACKAGE} through apt-get", lambda: _unpack_package(work)),
    }
    used, failures = [], []
    for name in sources if source == "auto" else dict.fromkeys(("local", source)):
        phrase, find_directory = sources[name]
        try:
            directory = find_directory()
            wanted, reasons = missing, []
            missing = []
            for file in wanted:
                try:
                    _adopt(directory, file, raw, work)
                except _Unavailable as error:
                    missing.append(file)
                    reasons.append(str(error))
            if len(missing) < len(wanted):
                used.append(phrase)
            if not missing:
                return " and ".join(used)
            nothing = reasons == [f"no {file.name}" for file in files]
            raise _Unavailable(f"no files in {directory}" if nothing else f"{directory}: {', '.join(reasons)}")
        except _Unavailable as error:
            failures.append(f"{name} ({error})")
    raise DataSourceError(
        f"Fashion-MNIST not found; tried {'; '.join(failures)}. Install it with `apt-get install {PACKAGE}`, "
        f"or put the four files under {raw}, or try --data.source=synthetic for a demonstration."
    )


def _adopt(directory: Path, file: IdxFile, raw: Path, work: Path) -> None:
    """Bring `file` from `directory`, plain or gzipped, into `raw`; passes over what fails the check, with a warning."""
    refused = []
    for path in (directory / file.name, directory / f"{file.name}.gz"):
        try:
            data = _read(path, file)
        except _Unavailable as error:
            refused.append(f"{path.name} {error}")
            logger.warning("%s %s; it is not used", path, error)
            continue
        if data is None:
            continue
        if path != raw / file.name:
            with open(work / f"{file.name}.new", "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(stream.name, raw / file.name)
        return
    raise _Unavailable(", ".join(refused) or f"no {file.name}")


def _read(path: Path, file: IdxFile) -> bytes | None:
    """Return the checked, uncompressed bytes, or None where nothing is; raises `_Unavailable` for anything else."""
    unpack: Callable[..., IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
    try:
        with unpack(path, "rb") as stream:
            data = stream.read(file.num_bytes + 1)  # one more than there should be, and no more
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, EOFError, zlib.error) as error:
        raise _Unavailable(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(data) != file.num_bytes:
        size = f"only {len(data)}" if len(data) < file.num_bytes else "more"
        raise _Unavailable(f"has {size} bytes, not {file.num_bytes}")
    if (md5 := hashlib.md5(data, usedforsecurity=False).hexdigest()) != file.md5:
        raise _Unavailable(f"has MD5 {md5}, not {file.md5}")
    return data


def _is_good(path: Path, file: IdxFile) -> bool:
    try:
        return _read(path, file) is not None
    except _Unavailable:
        return False


def _download(files: Sequence[IdxFile], work: Path) -> Path:
    """Download what is missing from torchvision's mirrors, with torchvision's progress bar."""
    from torchvision.datasets import FashionMNIST  # here: no other source needs it, and it takes 2.5 s to import
    from torchvision.datasets.utils import download_url

    names = {f"{file.name}.gz" for file in files}
    resources = [(name, md5) for name, md5 in FashionMNIST.resources if name in names]
    failures = []
    for mirror in FashionMNIST.mirrors:
        try:
            _check_answer(mirror + resources[0][0])
            Console(stderr=True).print(f"Downloading Fashion-MNIST from {mirror}", soft_wrap=True, highlight=False)
            with _socket_timeout(ANSWER_SECONDS):
                for name, md5 in resources:
                    download_url(mirror + name, work, name, md5)
            return work
        except (OSError, RuntimeError, HTTPException) as error:
            failures.append(f"{mirror}: {' '.join(str(error).split())}")
    raise _Unavailable("; ".join(failures))


def _check_answer(url: str) -> None:
    """Raise unless `url` answers soon; in a thread, as no socket timeout bounds the wait for a silent name server."""
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            urlopen(url, timeout=ANSWER_SECONDS).close()
            outcome.append(None)
        except (OSError, HTTPException, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    error = outcome[0] if outcome else TimeoutError(f"no answer in {ANSWER_SECONDS:g} s")
    if error is not None:
        raise error


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _unpack_package(work: Path) -> Path:
    """Fetch the Debian package into `work` and unpack it there: needs neither root nor the system's package lists."""
    if absent := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise _Unavailable(f"no {' and no '.join(absent)} here")
    work = work.resolve()  # apt takes a relative directory to be under its own
    for directory in ("lists/partial", "cache/archives/partial"):
        (work / directory).mkdir(parents=True)
    settings = (
        f"Dir::State::Lists={work}/lists",
        f"Dir::Cache={work}/cache",
        "Debug::NoLocking=1",
        "APT::Update::Error-Mode=any",  # an archive that does not answer is an error, and so has a message
        "Acquire::Retries=0",
        *(f"Acquire::{scheme}::Timeout={ANSWER_SECONDS:.0f}" for scheme in ("http", "https")),
    )
    apt_get = ["apt-get", *(word for setting in settings for word in ("-o", setting))]
    with Console(stderr=True).status(f"Fetching {PACKAGE} (31 MB) with apt-get"):
        update = _run([*apt_get, "update"], work)  # one broken archive fails it: the download is the judge
        if error := _run([*apt_get, "download", PACKAGE], work):
            raise _Unavailable(f"apt-get download: {error}" + (f"; apt-get update: {update}" if update else ""))
        if error := _run(["dpkg-deb", "-x", *map(str, work.glob(f"{PACKAGE}_*.deb")), f"{work}/unpacked"], work):
            raise _Unavailable(f"dpkg-deb: {error}")
    return work / "unpacked" / SYSTEM_DIR.relative_to("/")


def _run(command: list[str], cwd: Path) -> str:
    """Run a command in English and return its first error, '' where it succeeded."""
    english = {**os.environ, "LC_ALL": "C"}
    try:  # stdin is closed: nothing can ask
        done = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env=english,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=APT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"not done in {APT_SECONDS:.0f} s"
    if done.returncode == 0:
        return ""
    complaints = done.stderr.decode(errors="replace").splitlines()
    return next((line for line in complaints if line.startswith(("E:", "dpkg-deb:"))), f"exit status {done.returncode}")
