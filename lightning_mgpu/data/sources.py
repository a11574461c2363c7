"""Finds or downloads the four Fashion-MNIST files, and verifies their checksums.

A source is a function that returns a directory with the IDX files, plain or `.gz`. Checksums are
verified before every run, and damaged files are replaced.
"""

import fcntl
import gzip
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.request import urlopen

from torchvision.datasets import FashionMNIST

from lightning_mgpu.tools import atomic_write

# name -> MD5 of the uncompressed bytes, which do not depend on the compressor
FILES = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
PACKAGE = "dataset-fashion-mnist"  # of Debian and Ubuntu
SYSTEM_DIR = Path("/usr/share/datasets/fashion-mnist")  # of that package
FETCH = f"""exec < /dev/null # no question can stop it
mkdir -p lists/partial cache/archives/partial
set -- -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o Debug::NoLocking=1 \\
    -o Acquire::Retries=0 -o Acquire::http::Timeout=8 -o Acquire::https::Timeout=8
apt-get "$@" update # one broken archive fails it
apt-get "$@" download {PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb unpacked
"""


def ensure_fashion_mnist(root: str | Path, files: Mapping[str, str] = FILES) -> str:
    """Put the verified files under `{root}/FashionMNIST/raw`; return their source."""
    raw = Path(root).expanduser() / "FashionMNIST" / "raw"  # as in torchvision
    if all(_is_good(raw / name, md5) for name, md5 in files.items()):
        return f"files under {raw}"  # writes nothing: `root` may be read-only
    sources: dict[str, Callable[[Path], Path]] = {
        f"files under {raw}": lambda work: raw,
        f"files under {SYSTEM_DIR}": lambda work: SYSTEM_DIR,
        "torchvision's download": _download,
        f"{PACKAGE} through apt-get": _unpack_package,
    }
    problems = []
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / ".lock").open("w") as lock, tempfile.TemporaryDirectory() as work:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be downloading
        for source, find_directory in sources.items():
            try:
                directory = find_directory(Path(work))
                for name, md5 in files.items():
                    with atomic_write(raw / name) as part:
                        part.write_bytes(_read(directory / name))
                        if not _is_good(part, md5):
                            raise RuntimeError(f"{directory / name} is damaged")
                return source
            except Exception as error:  # try the next source
                problems.append(f"{source}: {' '.join(str(error).split())}")
    raise RuntimeError(
        f"Fashion-MNIST not found. Install it with `apt-get install {PACKAGE}`, or put the four "
        f"files under {raw}, or try --data.source=synthetic. Tried:\n" + "\n".join(problems)
    )


def _is_good(path: Path, md5: str) -> bool:
    return path.exists() and hashlib.md5(path.read_bytes()).hexdigest() == md5


def _read(path: Path) -> bytes:
    zipped = path.with_name(f"{path.name}.gz")
    return path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())


def _download(work: Path) -> Path:
    """Download the files from torchvision's mirror, 30 MB."""
    for name in FILES:
        url = f"{FashionMNIST.mirrors[0]}{name}.gz"
        print(f"Downloading {url}", file=sys.stderr, flush=True)
        with urlopen(url, timeout=8) as response:  # torchvision's function has no timeout
            (work / f"{name}.gz").write_bytes(response.read())
    return work


def _unpack_package(work: Path) -> Path:
    """Download and unpack the Debian package in `work`, without root or package lists."""
    print(f"Fetching {PACKAGE} (31 MB) with apt-get", file=sys.stderr, flush=True)
    done = subprocess.run(["sh", "-c", FETCH], cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return work / "unpacked" / SYSTEM_DIR.relative_to("/")
