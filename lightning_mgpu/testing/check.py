"""Judge a strategy: each case in processes of its own."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.testing.cases import PROMISES, SAME_BITS, Run
from lightning_mgpu.tools import run_in_group


def check_strategy(
    strategy: str,
    devices: int = 2,
    accelerator: str = "cpu",
    promises: Sequence[str] = tuple(PROMISES),
    timeout: float = 300.0,
    **options: Any,
) -> Iterator[tuple[str, str, str]]:
    """Try out what a strategy promises; yields promise, answer, and why it is not `yes`.

    The other answers are `no`, `refused` and `not applicable`. The strategy is a registered name
    or a dotted path, and gets the `options`, plain values. A case may take `timeout` seconds.
    """
    for name in promises:
        with tempfile.TemporaryDirectory(prefix="testing-") as directory:
            run = Run(directory, strategy, devices, accelerator, options, timeout)
            judge = same_bits if name == SAME_BITS else run_case
            yield name, *judge(name, run)


def same_bits(name: str, run: Run) -> tuple[str, str]:
    """Compare the weights of four replicas on 1, 2 and 4 devices."""
    if not hasattr(make_strategy(run.strategy, **run.options), "replicas"):
        return "not applicable", "it has no option `replicas`"
    run = run._replace(options={**run.options, "replicas": 4})
    answers = {run_case(name, run._replace(devices=k)) for k in (1, 2, 4)}
    if {word for word, _ in answers} != {"yes"}:
        return min(answers)  # `no` before `refused` before `yes`
    return ("yes", "") if len(answers) == 1 else ("no", "the weights differ")


def run_case(name: str, run: Run) -> tuple[str, str]:
    """The answer and the note that a case prints, or how its process has ended."""
    command = [sys.executable, "-W", "ignore", "-m", __package__, "--case", name, json.dumps(run)]
    log = Path(run.directory, "log")
    with log.open("w") as output:
        status = run_in_group(command, output)
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        word, _, note = line.partition(":")
        if word in ("yes", "no", "refused"):
            return word, note.strip()
    errors = [line for line in lines if "Error: " in line or line.startswith("Timeout (")]
    return "no", f"ended with status {status}: {['no output', *lines[-1:], *errors][-1]}"
