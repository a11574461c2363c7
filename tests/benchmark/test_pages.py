"""The README's and docs' commands of the benchmark are such as it takes."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.benchmark import time_to_accuracy
from lightning_mgpu.benchmark.cli import parser

REPOSITORY = Path(__file__).parents[2]
TEXT = "\n".join(path.read_text() for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")))
COMMANDS = dict.fromkeys(re.findall("^python -m lightning_mgpu benchmark (.*)$", TEXT, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_taken(line: str, main: Callable[..., int]) -> None:
    args = shlex.split(line)
    if args[0] == "time_to_accuracy":
        _, of_fit = time_to_accuracy.parse(args[1:])
        assert main("fit", *of_fit, "--print_config") == 0
    else:
        assert args[0] == "compare" or parser().parse_args(args)
