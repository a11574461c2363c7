"""A project of your own: a renamed copy of this clone, without the rooms you do not want.

    python -m lightning_mgpu new ../my_project --drop benchmark testing sweep book

What belongs to a room: directories and files of its name (`NAME/`, `NAME.py`, `test_NAME.py`); lines that begin with
its command; lines with the mark `room: NAME` in a comment; from a line with nothing but this mark, all lines to `/room`
or to the file's end. Nothing else imports a room, so that it can go.

A name longer than the old one makes some lines too long for ruff. `ruff check .` in the copy shows them.
"""

import argparse
import keyword
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath

from lightning_mgpu.runs.errors import ToolParser, UsageError

ROOMS = ("benchmark", "testing", "sweep", "book", "simulated")  # what --drop takes
CLONE = Path(__file__).parents[2]
MARK = re.compile(r"(?:#|<!--) room: (\w+)(?: -->)?")
LICENSE = PurePath("LICENSE")  # names the authors, whatever the project is called
NEXT = """\
{count} files in {target}. Go on with:
    cd {target} && git init && pip install -e ".[dev]"
    python -m {name} fit --config mode/debug.yaml
    ruff check --fix . && ruff format . && pytest -n 2
"""


def main(arguments: Sequence[str]) -> None:
    """Entry point of `new`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ToolParser(prog="python -m lightning_mgpu new", description=__doc__, formatter_class=formatter)
    parser.add_argument("target", type=Path, help="the new directory; its name is the package's name")
    parser.add_argument("--drop", nargs="+", default=[], metavar="ROOM", help=f"what to leave out: {', '.join(ROOMS)}")
    args = parser.parse_args(arguments)
    name = args.target.resolve().name
    check(args.target, name, args.drop)
    count = copy(tracked_files(), args.target, name, {*args.drop, "new"})
    print(NEXT.format(count=count, target=args.target, name=name), end="")


def check(target: Path, name: str, rooms: Iterable[str]) -> None:
    if not (CLONE / ".git").exists() or not shutil.which("git"):
        raise UsageError("new copies what git tracks, and this is no clone, or git is missing: run `new` in a clone")
    if target.exists():
        raise UsageError(f"new {target}: it exists. Name a new directory")
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name) or keyword.iskeyword(name) or "mgpu" in name:
        raise UsageError(f"new {target}: {name} is no name for a package. Take small letters, digits and _: my_project")
    if find_spec(name):
        raise UsageError(f"new {target}: a package {name} is installed already. Choose another name")
    if wrong := [room for room in rooms if room not in ROOMS]:
        raise UsageError(f"new --drop {' '.join(wrong)}: what can be dropped is {', '.join(ROOMS)}")


def tracked_files() -> list[PurePath]:
    """What git tracks in this clone."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=CLONE, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"new copies what git tracks: {done.stderr.strip()}")
    return [PurePath(name) for name in done.stdout.split("\0") if (CLONE / name).is_file()]


def copy(paths: Iterable[PurePath], target: Path, name: str, rooms: Collection[str]) -> int:
    """Write the files under their new names, without the rooms. Returns how many there are."""
    count = 0
    for path in paths:
        if any(part.removesuffix(".py").removeprefix("test_") in rooms for part in path.parts):
            continue
        content = (CLONE / path).read_bytes()
        if path != LICENSE and b"\0" not in content:
            text = rename(without(content.decode(), rooms), name)
            if content and not text:
                continue
            content = text.encode()
        new = target / rename(str(path), name)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        shutil.copymode(CLONE / path, new)
        count += 1
    return count


def without(text: str, rooms: Collection[str]) -> str:
    """The text without the lines of some rooms."""
    command = re.compile(rf"[#\s]*python -m lightning_mgpu[ .]({'|'.join(rooms)})\b")
    kept, skipping = [], False
    for line in text.splitlines(keepends=True):
        mark = MARK.search(line)
        if skipping:
            skipping = not re.search(r"(#|<!--) /room\b", line)
        elif mark and mark[1] in rooms:
            skipping = mark[0] == line.strip()
        elif not command.match(line):
            kept.append(line)
    return "".join(kept)


def rename(text: str, name: str) -> str:
    """The text with the new name in all three spellings."""
    text = text.replace("lightning_mgpu", name)
    text = text.replace("lightning-mgpu", name.replace("_", "-"))
    return text.replace("LIGHTNING_MGPU", name.upper())
