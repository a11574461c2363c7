"""docs/multi_gpu.ipynb runs from top to bottom; its outputs are those of such a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[1]
PATH = REPOSITORY / "docs" / "multi_gpu.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning_mgpu.drawing")
    pytest.importorskip("lightning_mgpu.book")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(PATH, as_version=4)
    folder = {"metadata": {"path": str(PATH.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute()


def test_outputs_are_of_one_run_and_small() -> None:
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= 6
    assert PATH.stat().st_size < 500_000
