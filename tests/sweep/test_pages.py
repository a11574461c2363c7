"""The README's and docs' sweeps are such as it takes, and so are the options for `fit` that they give."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.sweep.cli import parser
from lightning_mgpu.sweep.plan import read_sweep

REPOSITORY = Path(__file__).parents[2]
TEXT = "\n".join(path.read_text() for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")))
COMMANDS = dict.fromkeys(re.findall("^python -m lightning_mgpu sweep (.*)$", TEXT, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_taken(line: str, main: Callable[..., int]) -> None:
    args, fit = parser().parse_known_args(shlex.split(line))
    assert read_sweep(args.config[0], args.count, args.seed, args.sweep_dir, fit)
    assert main("fit", *fit, *(f"--config={config}" for config in args.config[1:]), "--print_config") == 0
