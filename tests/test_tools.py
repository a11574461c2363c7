"""Files that are whole or not there, and the name of the program that was started."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_mgpu.tools import program, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as part:
            part.write_text("half of the ne")
            assert part.suffix == ".pt2" and path.read_text() == "old"
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"] and path.read_text() == "old"
    with replacing(path) as part:
        part.write_text("new")
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"] and path.read_text() == "new"


@pytest.mark.parametrize(
    ("started", "name"),
    [
        ("lightning_mgpu.__main__", "lightning_mgpu"),
        ("json.tool", "json"),
        ("this", "lightning_mgpu"),  # a module of no package, as a debugger's
    ],
)
def test_the_program_is_the_package_that_was_started(
    started: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec(started), raising=False)
    assert program() == name
