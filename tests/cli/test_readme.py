"""The command line accepts every command of README and docs/; the files that they name exist.

The commands of a directory that can be deleted are tried by its own tests.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    path: path.read_text()
    for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))
}
README = PAGES[REPOSITORY / "README.md"]
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
LINES = dict.fromkeys(line for block in BLOCKS for line in block.splitlines())
COMMANDS = [
    line
    for line in LINES
    if re.match("python -m lightning_mgpu (fit|validate|test|predict|export) ", line)
]
LINKS = [
    (path, link)
    for path, text in PAGES.items()
    for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", text)
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 20
    assert all(f"<!-- run: {name} -->\n```bash\n" in README for name in ("main", "test"))


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_taken(
    line: str, main: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name, code in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, flags=re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if " export " in line or "--resume=" in line:  # of a checkpoint or a run that is not there
        assert main(*shlex.split(line)[3:]) == 2
        assert ("no such file" if " export " in line else "--resume=") in capsys.readouterr().err
        return
    # made by the command before
    args = [arg for arg in shlex.split(line)[3:] if not arg.startswith("--ckpt_path")]
    shows_help = "help" in args[-1]
    assert main(*args, *([] if shows_help else ["--print_config"])) == 0
    assert ("usage: " if shows_help else "trainer") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "link"), LINKS, ids=[f"{page.name}:{link}" for page, link in LINKS]
)
def test_link_leads_somewhere(page: Path, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    assert target.exists()
    if anchor:
        titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
        assert anchor in [
            re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
        ]


def test_equal_bits_are_promised_with_what_gpus_need_for_them() -> None:
    for path, page in PAGES.items():
        if re.search(r"bits are the\s+same|same\s+bits|to the bit|same \*bits", page):
            assert "--trainer.deterministic=true" in page, path.name
