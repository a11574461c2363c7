"""Measure steps with each exchange, and with `ddp` and PyTorch's hooks, on emulated links.

    python scripts/exchanges_on_links.py --links 20,100 --rows ddp "ddp fp16" half top_k
    python scripts/exchanges_on_links.py --links 1,500 5,500 20,100 40,50 20,100,4
    python scripts/exchanges_on_links.py --links 1,500 --images 8 --model=ResNet18

A row is a name in ROWS, the path of a custom exchange, or a label and options of `fit`:

    --rows ddp "every 32=--trainer.strategy=exchange_diloco --trainer.strategy.sync_every=32"

A link is: one-way latency in ms, Mbit/s, and the number of machines (default: 2), with 128 images
and one thread each. Separate links per machine: 1/1/40,400/400/50,3. Other options are passed to
every `fit`. It prints the milliseconds per step, and the MB sent per machine. Lightning broadcasts
a flag before every batch; rows with a star do not.
"""

import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_mgpu.lab.network import links

BATCH, EVERY = 128, 16  # images per machine; steps between synchronizations
NUM_STEPS = 33 + 3 * EVERY  # the first 32 are a warm-up, and times are differences
FEW_STEPS = (
    *("--data.source=synthetic", "--trainer.max_epochs=1", "--trainer.logger=false"),
    *(f"--trainer.limit_train_batches={NUM_STEPS}", "--trainer.log_every_n_steps=0"),
    *("--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0", "--output.test=false"),
    *("--trainer.enable_checkpointing=false", "--output.curve=false"),
)
HERE, STRATEGY = Path(__file__).stem, "--trainer.strategy"
EXCHANGES = {
    "alone": ("auto",),  # one machine
    "manual_allreduce": ("manual_allreduce",),
    "exchange": ("exchange",),
    "half": ("exchange", f".exchange={HERE}.half"),
    "top_k": ("exchange_top_k",),
    "power_sgd": ("exchange_power_sgd", ".options={rank: 1}"),
    "sign": ("exchange_ef_sign",),
    "local_sgd": ("exchange_local_sgd", f".sync_every={EVERY}"),
    "diloco": ("exchange_diloco", f".sync_every={EVERY}"),
}
HOOKS = ("ddp", "ddp fp16", "ddp power_sgd", "ddp local_sgd")
ROWS = (*HOOKS, *(f"{hook}*" for hook in HOOKS), *EXCHANGES)


def half(X: Tensor, state: Any) -> Generator[Any, Any, Tensor]:
    return sum(received.to(X.dtype) for received in (yield X.half()))


class HookedDDP(DDPStrategy):
    """`ddp` with one of PyTorch's communication hooks, which Lightning ignores on CPUs."""

    def __init__(self, row: str, **kwargs: Any) -> None:
        local = local_sgd.PostLocalSGDState(None, None, 2, False)
        hooks: dict[str, tuple[Any, Any]] = {  # the last two begin in the third step
            "ddp fp16": (None, fp16_compress_hook),
            "ddp power_sgd": (power_sgd.PowerSGDState(None, 1, 2), power_sgd.powerSGD_hook),
            "ddp local_sgd": (local, local_sgd.post_localSGD_hook),
        }
        state, hook = hooks.get(row.strip("*"), (None, None))
        self.row = row
        self.sync_every = every = EVERY if "local" in row else None  # the network's table reads it
        super().__init__(
            ddp_comm_state=state, ddp_comm_hook=hook, model_averaging_period=every, **kwargs
        )

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self._ddp_comm_hook:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.row.endswith("*"):
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def find_row(row: str) -> tuple[str, list[str]]:
    """The label of a row, and its options for `fit`."""
    label, _, options = row.partition("=")
    if options.startswith("--"):
        return label, shlex.split(options)
    if "." in row:  # the path of an exchange
        strategy, *more = "exchange", f".exchange={row}"
    elif row in EXCHANGES:
        strategy, *more = EXCHANGES[row]
    elif row in ROWS:
        strategy, *more = f"{HERE}.HookedDDP", f".row={row}"
    else:
        known = f"{', '.join(ROWS)}, the path of an exchange, or 'label=--options'"
        sys.exit(f"no row {row!r}: use {known}")
    return row, [f"{STRATEGY}={strategy}", *(f"{STRATEGY}{option}" for option in more)]


def network_line(
    row: str, link: str, options: Sequence[str], images: int = BATCH, speedup: float = 1.0
) -> list[str]:
    """The arguments of `network` for a row on a link."""
    delay, mbit, machines = (*link.replace("/", " ").split(","), "2")[:3]
    machines = "1" if row == "alone" else machines
    line = [f"--machines={machines}", f"--delay_ms={delay}", f"--mbit={mbit}"]
    line = [option.replace(" ", ",") for option in line]
    batch = f"--data.batch_size={images * int(machines)}"
    return [*line, f"--speedup={speedup:g}", "fit", batch, *options, *find_row(row)[1]]


def run_network(line: Sequence[str]) -> str:
    """Run `network` and return its output. It ends with this script, even after `kill -9`."""
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "lightning_mgpu", "network", *line]
    end_with_script = partial(links.call, *links.END_WITH_PARENT)
    options: Any = {"capture_output": True, "text": True, "preexec_fn": end_with_script}
    done = subprocess.run(command, env=env, **options)
    if done.returncode or not read_table(done.stdout):
        sys.exit(f"network {shlex.join(line)}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def read_table(output: str) -> list[float]:
    """The MB that a machine sends, MB per step, and ms per step: means over the machines."""
    rows = [line.split("|") for line in re.findall(r"^\| \d.*", output, flags=re.MULTILINE)]
    return [mean(float(row[column]) for row in rows) for column in (2, 3, 5) if rows]


def measure(row: str, link: str, images: int, speedup: float, options: list[str]) -> str:
    with TemporaryDirectory() as run:
        given = (*FEW_STEPS, *options, f"--run_dir={run}")
        _, megabytes, ms = read_table(run_network(network_line(row, link, given, images, speedup)))
    return f"{ms:.0f} ms, {megabytes:.3f} MB"


def check_link(link: str) -> str:
    if not re.fullmatch(r"[\d./]+,[\d./]+(,\d+)?", link):
        raise ArgumentTypeError(f"{link!r}: use ms,Mbit/s or ms,Mbit/s,machines, such as 20,100")
    return link


def make_parser(description: str | None) -> ArgumentParser:
    options: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = ArgumentParser(description=description, **options)
    parser.add_argument("--links", type=check_link, nargs="+", default=["20,100"], help="links")
    parser.add_argument("--images", type=int, default=BATCH, help="per machine (default: 128)")
    parser.add_argument("--speedup", type=float, default=1.0, help="as for `network`")
    return parser


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="rows to measure")
    args, options = parser.parse_known_args()
    print("| per step |", " | ".join(args.links), "|")
    print("| --- " * (1 + len(args.links)) + "|")
    for row in args.rows:
        print(f"| {find_row(row)[0]} |", end="", flush=True)
        for link in args.links:
            cell = measure(row, link, args.images, args.speedup, options)
            print(f" {cell} |", end="", flush=True)
        print()
