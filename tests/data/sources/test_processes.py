"""Several processes that prepare the files at once, and killed ones."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import FILES, DataSourceError, IdxFile

NAMES = [file.name for file in FILES]
# The child needs this one module, not the package with Lightning.
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


@pytest.fixture
def child(TINY: tuple[IdxFile, ...]) -> Callable[..., subprocess.Popen[str]]:
    def start(root: Path, system_dir: Path, patch: str = "") -> subprocess.Popen[str]:
        table = [str(value) for file in TINY for value in (file.name, file.num_bytes, file.md5)]
        arguments = [str(Path(sources.__file__).parent), str(root), str(system_dir), patch, *table]
        return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)

    return start


def test_processes_preparing_at_once_share_one_result(
    root: Path, raw: Path, system_dir: Path, assert_complete: Callable, child: Callable
) -> None:
    children = [child(root, system_dir, "slow") for _ in range(3)]
    phrases = sorted(process.communicate(timeout=60)[0].strip() for process in children)
    package = f"Debian package dataset-fashion-mnist ({system_dir})"
    assert phrases == [package, f"files under {raw}", f"files under {raw}"]  # one worked, the others waited for it
    assert_complete(root)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_while_writing(
    moment: str, root: Path, raw: Path, system_dir: Path, ensure: Callable, assert_complete: Callable, child: Callable
) -> None:
    process = child(root, system_dir, moment)
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert list(raw.glob(f"{sources.PARTIAL}*/*"))  # it was in the middle of writing
    assert not [name for name in NAMES if (raw / name).exists()]
    ensure(root, system_dir=system_dir)  # and the dead one's lock is free
    assert_complete(root)


def test_a_lock_held_for_too_long_is_an_error(
    root: Path, raw: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable
) -> None:
    monkeypatch.setattr(sources, "LOCK_SECONDS", 0.1)
    raw.mkdir(parents=True)
    with FileLock(raw / ".lock"), pytest.raises(DataSourceError, match=r"another process .*\.lock"):
        ensure(root)
