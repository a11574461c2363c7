"""Imports point one way: no file imports, over whatever others, one that imports it; parts know what they may know."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_mgpu

ROOT = Path(lightning_mgpu.__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in Path(lightning_mgpu.__file__).parent.rglob("*.py")
}
PARTS = {name.split(".")[1] for name in FILES if name.count(".") > 1}  # directories


def imported(name: str) -> Iterator[str]:
    """The package's files that one of them imports, at its top or in a function."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            for alias in node.names:
                file = f"{node.module}.{alias.name}"
                yield from {file if file in FILES else str(node.module)} & FILES.keys()
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)


def test_no_file_imports_one_that_imports_it() -> None:
    above = {name: set(imported(name)) - {name} for name in FILES}
    assert sum(map(len, above.values())) > 150
    TopologicalSorter(above).prepare()  # raises CycleError with the files


@pytest.mark.parametrize("part", ["allreduce", "models", "data", "strategies"])
def test_these_know_no_other_part(part: str) -> None:
    known = {other.split(".")[1] for name in FILES if f".{part}." in name for other in imported(name)}
    assert part in known
    assert known & PARTS <= {part, *({"allreduce"} if part == "strategies" else ())}
