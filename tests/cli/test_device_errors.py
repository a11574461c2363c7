"""An error that a GPU reports is not the user's mistake, wherever the wait for it happens to be."""

import pytest

from lightning_mgpu.cli.errors import DEVICE_ERRORS, PACKAGES, one_line_errors

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize("package", PACKAGES, ids=["ours", "Lightning's"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError(ASSERT), *(error(ASSERT) for error in DEVICE_ERRORS)],
    ids=lambda error: type(error).__name__,
)
def test_a_device_error_keeps_its_traceback(package, error) -> None:
    with pytest.raises(type(error)) as caught, one_line_errors(show_traceback=False):
        exec(compile("raise error", package / "somewhere.py", "exec"), {"error": error})
    assert any("CUDA_LAUNCH_BLOCKING=1" in note for note in caught.value.__notes__)


def test_other_errors_of_these_files_are_mistakes(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit), one_line_errors(show_traceback=False):
        exec(compile("raise RuntimeError('no such option')", PACKAGES[1] / "somewhere.py", "exec"))
    assert capsys.readouterr().err.startswith("error: no such option")
