"""Create a project that depends on this package: model, data, configuration and tests.

python -m lightning_mgpu new ../my_project
python -m lightning_mgpu new ../my_project --from git+https://github.com/OWNER/lightning_mgpu
"""

import keyword
import re
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_mgpu import __version__
from lightning_mgpu.tools import make_parser

TEMPLATE = Path(__file__).parent / "template"
CLONE = Path(__file__).parents[2]


def new_command(arguments: Sequence[str]) -> None:
    """Entry point of `new`: write the project's files, with its name and our URL filled in."""
    parser = make_parser("new", __doc__)
    add = parser.add_argument
    add("target", type=Path, help="new directory; its name becomes the name of the package")
    default = CLONE.as_uri() if (CLONE / "pyproject.toml").is_file() else None
    add("--from", dest="url", default=default, required=not default, help="pip URL of this package")
    options = parser.parse_args(arguments)
    target, name = options.target, options.target.resolve().name
    if target.exists():
        parser.error(f"{target} exists: use a new directory")
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name) or keyword.iskeyword(name):
        parser.error(f"{name} is not a valid package name: use lowercase letters, digits and _")
    if find_spec(name):
        parser.error(f"a package {name} exists already: use a different name")
    hosted = re.sub("^file:.*", "git+https://github.com/OWNER/lightning_mgpu", options.url)
    words = {"my_project": name, "my-project": name.replace("_", "-")}
    words |= {"0.0.0": __version__, "ADDRESS": hosted}
    fill_in = partial(re.sub, "|".join(words), lambda match: words[match[0]])  # in one pass
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as part:  # atomic: all files or none
        for source in TEMPLATE.rglob("*"):
            path = str(source.relative_to(TEMPLATE))
            if source.is_file() and "cache" not in path:  # __pycache__, .ruff_cache
                file = Path(part, name, fill_in(path))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(fill_in(source.read_text()))
        Path(part, name).rename(target)
    print(f"Created {target}. Next:")
    print(f'    cd {target} && git init && pip install -e ".[test]" && python -m {name} fit')
    print(f'In another environment, first: pip install "lightning-mgpu[sweep] @ {options.url}"')
