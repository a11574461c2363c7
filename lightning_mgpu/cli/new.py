"""A project of your own: a renamed copy of this clone, without the rooms you do not want.

    python -m lightning_mgpu new ../my_project --drop benchmark testing sweep book

What belongs to a room: directories and files of its name (`NAME/`, `NAME.py`, `test_NAME.py`);
lines that begin with its command; lines with the mark `room: NAME` in a comment; from a line with
nothing but this mark, all lines to `/room` or the file's end. Nothing else imports a room.

A name longer than the old one makes some lines too long. `ruff check .` in the copy shows them.
"""

import argparse
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path, PurePath

from lightning_mgpu.errors import ToolParser, UsageError

ROOMS = ("benchmark", "testing", "sweep", "book", "simulated")  # what --drop takes
CLONE = Path(__file__).parents[2]
MARK = re.compile(r"(?:#|<!--) room: (\w+)(?: -->)?")
NEXT = """\
{target} is a project of your own. Go on with:
    cd {target} && git init && pip install -e ".[dev]"
    python -m {name} fit --config mode/debug.yaml
    ruff check --fix . && ruff format . && pytest -n 2
"""


def main(arguments: Sequence[str]) -> None:
    """Entry point of `new`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ToolParser(
        prog="python -m lightning_mgpu new", description=__doc__, formatter_class=formatter
    )
    parser.add_argument(
        "target", type=Path, help="the new directory; its name is the package's name"
    )
    parser.add_argument("--drop", nargs="+", default=[], choices=ROOMS, help="what to leave out")
    args = parser.parse_args(arguments)
    target, name = args.target, args.target.resolve().name
    if not (CLONE / ".git").exists():
        raise UsageError("new copies what git tracks, and this is no clone: run `new` in a clone")
    if target.exists():
        raise UsageError(f"new {target}: it exists. Name a new directory")
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name):
        raise UsageError(
            f"new {target}: {name} is no name for a package. Take small letters, digits and _: "
            "my_project"
        )
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CLONE, capture_output=True, text=True, check=True
    ).stdout
    for path in map(PurePath, listed.rstrip("\0").split("\0")):
        copy(path, target, name, {*args.drop, "new"})
    print(NEXT.format(target=target, name=name), end="")


def copy(path: PurePath, target: Path, name: str, rooms: Collection[str]) -> None:
    """Write a file under its new name, without the rooms; a room's own file is left out."""
    if any(part.removesuffix(".py").removeprefix("test_") in rooms for part in path.parts):
        return
    content = (CLONE / path).read_bytes()
    # which names the authors, whatever the project is called
    if path.name != "LICENSE" and b"\0" not in content:
        text = rename(without(content.decode(), rooms), name)
        if content and not text:
            return
        content = text.encode()
    new = target / rename(str(path), name)
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(content)
    shutil.copymode(CLONE / path, new)


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
