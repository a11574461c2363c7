"""Versions known to work together are as pyproject.toml takes them, hashed, with no index named."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib")  # Python 3.11
REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FILE = (REPOSITORY / ".github" / "requirements.txt").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", FILE, flags=re.MULTILINE))
MALICIOUS = ("2.6.2", "2.6.3")  # of lightning: GHSA-w37p-236h-pfx3


def test_pins_are_within_the_bounds_and_malicious_releases_are_not() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]
    asked = {
        each.name: each.specifier
        for each in map(Requirement, lines)
        if each.name != PROJECT["name"]
    }
    assert len(asked) > 20
    assert not [name for name, specifier in asked.items() if PINS[name.lower()] not in specifier]
    for name in ("lightning", "pytorch-lightning"):
        assert PINS[name] not in MALICIOUS and "2.6.6" in asked[name]
        assert not [version for version in MALICIOUS if version in asked[name]]


def test_every_pin_has_hashes_and_no_index_is_named() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", FILE, flags=re.MULTILINE)
    assert blocks[0].count("\n") == 2 and "uv pip compile pyproject.toml" in blocks[0]
    assert len(blocks) - 1 == len(PINS) > 100
    assert all(
        re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", block)
        for block in blocks[1:]
    )
