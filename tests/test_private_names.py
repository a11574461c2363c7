from pathlib import Path

import lightning_mgpu
from tests.private_names import NAMES, TRACE_NAMES, private_names


def test_the_list_has_all_private_names_and_no_others() -> None:
    package = Path(lightning_mgpu.__file__).parent
    traces = private_names(package / "drawing")
    assert traces - NAMES.keys() == (TRACE_NAMES.keys() if traces else set())
    assert private_names(package) - TRACE_NAMES.keys() == NAMES.keys()
    assert len(NAMES) <= 33
