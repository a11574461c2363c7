"""The pinned versions fit pyproject.toml. That all have hashes, pip sees (`--require-hashes`)."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILE = (REPOSITORY / ".github" / "requirements.txt").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", FILE, flags=re.MULTILINE))
MALICIOUS = ("2.6.2", "2.6.3")  # of lightning: GHSA-w37p-236h-pfx3


def test_pins_are_within_the_bounds_and_malicious_releases_are_not() -> None:
    names = ("fast", "sweep", "test", "dev")  # all that the file is made for
    lines = [*PROJECT["dependencies"], *(line for name in names for line in EXTRAS[name])]
    asked = {each.name: each.specifier for each in map(Requirement, lines)}
    del asked[PROJECT["name"]]
    assert len(asked) > 15
    assert not [name for name, specifier in asked.items() if PINS[name.lower()] not in specifier]
    for name in ("lightning", "pytorch-lightning"):
        assert PINS[name] not in MALICIOUS and "2.6.6" in asked[name]
        assert not [version for version in MALICIOUS if version in asked[name]]
