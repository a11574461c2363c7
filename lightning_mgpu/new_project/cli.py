"""A small project of your own, which depends on this package: a model, data, settings, tests.

python -m lightning_mgpu new ../my_project
python -m lightning_mgpu new ../my_project --from git+https://github.com/OWNER/lightning_mgpu
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_mgpu.commands import ToolParser
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import command

TEMPLATE = Path(__file__).parent / "template"
CLONE = Path(__file__).parents[2]
NEXT = """\
{target} is a project of your own. Go on with:
    cd {target} && git init && pip install -e ".[test]"
    python -m {name} fit
    pytest
"""


def new_command(arguments: Sequence[str]) -> None:
    """Entry point of `new`."""
    parser = ToolParser(f"{command()} new", __doc__)
    parser.add_argument("target", type=Path, help="the new directory; its name is the package's")
    parser.add_argument(
        "--from",
        dest="address",
        default=CLONE.as_uri() if (CLONE / "pyproject.toml").is_file() else "",
        help="the URL that pip installs lightning-mgpu from (default: this clone's)",
    )
    args = parser.parse_args(arguments)
    new(args.target, args.address)


def new(target: Path, address: str) -> None:
    """Write the project's files, with its name and the address of this package in them.

    Raises:
        UsageError: If the name is taken or is not one, or the address is not a URL.
    """
    name = target.resolve().name
    if target.exists():
        raise UsageError(f"new {target}: it exists. Name a new directory")
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name):
        raise UsageError(
            f"new {target}: {name} is not a name for a package. Take small letters, digits and _: "
            "my_project"
        )
    if find_spec(name):
        raise UsageError(f"new {target}: Python has a package {name} already. Take another name")
    if "://" not in address:
        raise UsageError(
            f"new --from={address}: give the URL that pip installs lightning-mgpu from, such as "
            "git+https://github.com/OWNER/lightning_mgpu"
        )
    words = {
        "my_project": name,
        "my-project": name.replace("_", "-"),
        "file:///LIGHTNING_MGPU": address,
    }
    for source in TEMPLATE.rglob("*"):
        path = str(source.relative_to(TEMPLATE))
        if source.is_dir() or "cache" in path:  # __pycache__, .ruff_cache
            continue
        file = target / fill_in(path, words)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fill_in(source.read_text(), words))
        except OSError as error:
            raise UsageError(f"new {target}: {file} cannot be written: {error.strerror}") from error
    print(NEXT.format(target=target, name=name), end="")


def fill_in(text: str, words: dict[str, str]) -> str:
    """The text with every word of the template replaced, in one pass: an address may hold one."""
    return re.sub("|".join(words), lambda match: words[match[0]], text)
