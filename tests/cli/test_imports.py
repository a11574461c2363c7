"""Imports point one way, parts know what they may, and what can be deleted is imported nowhere."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.test_deletable import deletable_parts

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "lightning_mgpu").rglob("*.py")
}
KNOWN = {  # a part, and the others that it may import
    "allreduce": set(),
    "models": set(),
    "distributed.sharding": set(),
    "data": {"distributed.sharding"},
    "runs": set(),
    "distributed.processes": {"distributed.sharding"},
    "distributed.comm": {"allreduce", "distributed.processes"},
    "strategies": {
        "allreduce",
        "distributed.sharding",
        "distributed.processes",
        "distributed.comm",
    },
    "callbacks": {"runs"},
}
DROPPABLE = [Path(name).stem for name in deletable_parts()]


def imported(path):
    """The package's files that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else str(node.module) for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def directory(path):
    """`distributed.comm` for a file in it, `.` for a file beside `__init__.py`."""
    return str(path.parent.relative_to(ROOT / "lightning_mgpu")).replace("/", ".")


def test_no_file_imports_one_that_imports_it():
    above = {name: {*imported(path)} & FILES.keys() - {name} for name, path in FILES.items()}
    assert "lightning_mgpu.cli.options" in above["lightning_mgpu.cli.training_cli"]
    TopologicalSorter(above).prepare()  # raises CycleError with the files


@pytest.mark.parametrize("part", KNOWN)
def test_what_parts_know_of_others(part):
    inside = [path for path in FILES.values() if directory(path) == part]
    assert inside
    files = FILES.keys() & {name for path in inside for name in imported(path)}
    top = "."  # `seeds`, `devices` and `tools`
    assert {directory(FILES[name]) for name in files} <= {part, top, *KNOWN[part]}


@pytest.mark.parametrize("name", DROPPABLE)
def test_nothing_imports_what_can_be_deleted(name):
    """Neither the package nor a test, except its own files."""
    for path in (*FILES.values(), *(ROOT / "tests").rglob("*.py")):
        inside = path.relative_to(ROOT)
        if name not in (*inside.parts, inside.stem.removeprefix("test_")):
            modules = [each for each in imported(path) if each.startswith("lightning_mgpu.")]
            assert not [each for each in modules if name in each.split(".")], inside
