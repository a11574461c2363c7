"""The pinned versions fit pyproject.toml, have hashes, and name no index."""

import gc
import importlib
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lightning_mgpu
from lightning_mgpu.cli.error_messages import EXTRAS

tomllib = pytest.importorskip("tomllib")  # Python 3.11
REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FILE = (REPOSITORY / ".github" / "requirements.txt").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", FILE, flags=re.MULTILINE))
MALICIOUS = ("2.6.2", "2.6.3")  # of lightning: GHSA-w37p-236h-pfx3


def test_pins_are_within_the_bounds_and_malicious_releases_are_not() -> None:
    extras = PROJECT["optional-dependencies"]
    names = ("fast", "sweep", "test", "dev")  # all that the file is made for
    lines = [*PROJECT["dependencies"], *(line for name in names for line in extras[name])]
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


def test_errors_name_the_extras_as_they_are() -> None:
    """Errors name extras that exist. `test` and `dev`, which no error names, are for the tests."""
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in [Requirement(line).name for line in extras[extra]]
    assert set(extras) == {*EXTRAS.values(), "test", "dev"}


def test_every_pin_has_hashes_and_no_index_is_named() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", FILE, flags=re.MULTILINE)
    assert blocks[0].count("\n") == 2 and "uv pip compile pyproject.toml" in blocks[0]
    assert len(blocks) - 1 == len(PINS) > 100
    assert all(
        re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", block)
        for block in blocks[1:]
    )


def test_actions_are_pinned_by_commit_and_texts_agree_on_python_and_on_pytest() -> None:
    workflows = [path.read_text() for path in REPOSITORY.glob(".github/workflows/*.yml")]
    actions = re.findall(r"uses: \S+@(.*)", "".join(workflows))
    assert len(actions) > 5
    assert all(re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    script = (REPOSITORY / ".ci" / "run").read_text()
    minimum = re.findall(r"version_info < \((\d+), (\d+)\)", script)
    assert PROJECT["requires-python"] == ">=" + ".".join(*minimum)
    names = ("README.md", ".github/CONTRIBUTING.md")
    told = [*workflows, *((REPOSITORY / name).read_text() for name in names)]
    assert set(re.findall(r"--dist=\w+", "".join(told))) == {"--dist=worksteal"}


def test_the_import_leaves_the_garbage_collector_as_it_was() -> None:
    """Objects that are frozen are never collected."""
    frozen, garbage = gc.get_freeze_count(), ["young"]
    importlib.reload(lightning_mgpu)
    assert garbage and gc.get_freeze_count() == frozen and gc.isenabled()
