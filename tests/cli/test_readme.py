"""The command line accepts every command of the pages; the files that they name exist.

The commands of a directory that can be deleted are tried by its own tests.
"""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_mgpu.cli.training_cli import TrainingCLI
from tests.test_deletable import deletable_parts

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    path: path.read_text()
    for folder in (".", ".github", "docs")
    for path in (REPOSITORY / folder).glob("*.md")
}
TEXT = "\n".join(PAGES.values())
COMMAND = re.compile("^python -m lightning_mgpu (?:fit|validate|test|predict) .*", re.MULTILINE)
LINES = COMMAND.findall(TEXT)
if not find_spec("lightning_mgpu.exchanges"):  # which can be deleted
    LINES = [line for line in LINES if "--trainer.strategy=exchange" not in line]
LINKS = [
    (path, link)
    for path, text in PAGES.items()
    for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", text)
]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_command_is_taken(line, main, tmp_path, monkeypatch, capsys):
    for name, code in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, flags=re.DOTALL):
        (tmp_path / name).write_text(code)
    files = ("--ckpt_path=", "--weights=", "--resume=")  # made by the commands before
    args = [arg for arg in shlex.split(line)[3:] if not arg.startswith(files)]
    # by then the options are parsed; `--print_config` would take any option
    monkeypatch.setattr(TrainingCLI, "build", lambda *_: sys.exit())
    assert main(*args) == 0, capsys.readouterr().err


def test_there_are_commands():
    assert len({*LINES}) > 15


@pytest.mark.parametrize(
    ("page", "link"), LINKS, ids=[f"{page.name}:{link}" for page, link in LINKS]
)
def test_link_leads_somewhere(page, link):
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    parts = {Path(part).name for part in deletable_parts()}
    for path in (target, *target.parents):
        if path.name in parts and not path.exists():
            pytest.skip(f"{path.name} has been deleted")
    assert target.exists()
    titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if anchor else []
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert not anchor or anchor in anchors
