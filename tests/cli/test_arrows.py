"""Imports go one way: no file imports, over others, one that imports it; parts know what they may.

Nothing imports a directory that can be deleted.
"""

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
DROPPABLE = ("benchmark", "testing", "sweep", "book", "new_project")


def imported(path: Path) -> Iterator[str]:
    """The package's files that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                file = f"{node.module}.{alias.name}"
                yield from {file if file in FILES else str(node.module)} & FILES.keys()
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)


def test_no_file_imports_one_that_imports_it() -> None:
    above = {name: set(imported(path)) - {name} for name, path in FILES.items()}
    # imports are found: those of a file that has many, and more than two per file on average
    strategies = {"auto_split", "collectives", "combining", "gradients", "hooks", "lockstep"}
    strategies |= {"manual_optimization", "records", "replicas", "loss_weight", "same_program"}
    strategies |= {"edits", "layers", "reducing"}
    strategies |= {"devices_and_attributes", "split_batch", "sync_batchnorm", "updates"}
    assert above["lightning_mgpu.strategies.run_step"] == {
        f"lightning_mgpu.strategies.{n}" for n in strategies
    }
    assert sum(map(len, above.values())) > 2 * len(FILES)
    TopologicalSorter(above).prepare()  # raises CycleError with the files


KNOWN: dict[str, set[str]] = {
    "allreduce": set(),
    "models": set(),
    "data": set(),
    "strategies": {"allreduce"},
    "callbacks": {"data", "runs"},  # of data, the sampler of global batches
    "runs": set(),
}


@pytest.mark.parametrize("part", KNOWN)
def test_what_parts_know_of_others(part: str) -> None:
    known = {
        other.split(".")[1]
        for name, path in FILES.items()
        if f".{part}." in name
        for other in imported(path)
    }
    assert part in known
    assert known & PARTS <= {part, *KNOWN[part]}


@pytest.mark.parametrize("name", DROPPABLE)
def test_nothing_imports_what_can_be_deleted(name: str) -> None:
    """Neither the package nor a test, except its own files."""
    for path in (*FILES.values(), *(ROOT / "tests").rglob("*.py")):
        inside = path.relative_to(ROOT)
        if name not in (*inside.parts, inside.stem.removeprefix("test_")):
            assert not [file for file in imported(path) if file.split(".")[1:2] == [name]], inside
