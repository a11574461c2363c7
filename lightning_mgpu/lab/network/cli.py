"""How long is a step on several machines? Here each is a network namespace of this one.

    python -m lightning_mgpu network --machines 2 --delay_ms 20 --mbit 100 fit [options]

A machine has one CPU process, or several with `--trainer.strategy.replicas`. They reach the other
machines and nothing else. At the end a table shows what each machine has sent, and how long a step
took and waited, without the first 32.
"""

import json
import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import IO, Any

from lightning_mgpu.distributed.processes.failures import SHARES_CORES
from lightning_mgpu.lab.network import clock, links
from lightning_mgpu.lab.network.steps import Steps
from lightning_mgpu.tools import LAST, command, make_parser, program

LISTS = ("delay_ms", "mbit", "slowdown")  # options with a value for each machine, or for all


def network_command(arguments: list[str]) -> None:
    parser = make_parser("network", __doc__)
    add = parser.add_argument
    add("--machines", type=int, metavar="N", default=2)
    add("--speedup", type=float, default=1.0, help="by this factor than a core of this machine")
    many: Any = {"type": numbers, "metavar": "X[,X...]"}
    add("--delay_ms", **many, default=[20.0], help="between machines: half of it at each end")
    add("--mbit", **many, default=[100.0], help="per second that each can send, and receive")
    add("--slowdown", **many, default=[1.0], help="by this factor a machine computes more slowly")
    add("--csv", help="write a row per machine and step to this file")
    add("--picture", help="draw some steps of each machine to this file")
    add("fit", choices=["fit"], help="and its options")
    # what comes after `fit` is not parsed here
    end = arguments.index("fit") + 1 if "fit" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    args.options = arguments[end:]
    for name in LISTS:
        values = getattr(args, name)
        if len(values) not in (1, args.machines):
            parser.error(f"--{name}: give one value, or {args.machines}, separated by commas")
        setattr(args, name, (values * args.machines)[: args.machines])
    for option, suffix in (("csv", ".csv"), ("picture", ".png")):
        value = getattr(args, option)
        path = Path(f"none{suffix}" if value is None else value).absolute()
        if path.suffix != suffix or not path.parent.is_dir():
            parser.error(f"--{option}={path}: name a {suffix} in a directory that is there")
    if sys.platform != "linux":
        parser.error("network namespaces are Linux's")
    if (rate := max(args.mbit) / args.speedup) > 500:
        print(f"--mbit: {rate:g} here, and Python carries about 500 each way, so it may be less")
    with TemporaryFile("a+b", buffering=0) as file:
        status = fit(args, file)
        steps = Steps(file, args.speedup)
    if len(steps.rows):
        steps.print_table(args.mbit)
        if args.csv:
            steps.write_csv(args.csv)
    elif not status:
        print("no step was measured: there was none, or the run began without `network`")
    if args.picture and steps.spans:
        steps.draw().savefig(args.picture, dpi=110)
    elif args.picture:
        print(f"no {args.picture}: it has steps after the first {clock.WARM_UP}")
    if status:
        print(how_to_go_on(args.machines, steps.run))
    sys.exit(status)


def numbers(text: str) -> list[float]:
    """One value for all machines, or one per machine, separated by commas."""
    return [*map(float, text.split(","))]


def how_to_go_on(machines: int, run: Path | None) -> str:
    if run is None or not (run / "checkpoints" / LAST).is_file():
        return "start again"
    on_one = f"without network, add --trainer.num_nodes=1 --trainer.devices={machines}"
    resume = f"network --machines={machines} fit --resume={shlex.quote(os.path.relpath(run))}"
    return f"go on with: {command()} {resume} ({on_one})"


def fit(args: Namespace, file: IO[bytes]) -> int:
    """Train on machines, whose StepClocks write to `file`; returns the exit status."""
    network = {name: getattr(args, name) for name in ("machines", "speedup", *LISTS)}
    line = [sys.executable, "-I", "-S", links.__file__, str(os.getpid()), str(args.speedup)]
    line += [*(",".join(map(str, network[n])) for n in ("delay_ms", "mbit"))]
    line += [sys.executable, "-m", program(), "fit"]
    line += [f"--trainer.num_nodes={args.machines}", "--trainer.devices=1"]
    line += ["--trainer.accelerator=cpu", *args.options]
    if not any(option.startswith("--resume") for option in args.options):  # else the run has it
        line.append(f"--trainer.callbacks+={clock.__name__}.StepClock")
    usual = {"WANDB_MODE": "offline", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "OMP_NUM_THREADS" not in os.environ:  # a strategy with replicas divides the cores by these
        threads = max(1, len(os.sched_getaffinity(0)) // args.machines)
        usual |= {"OMP_NUM_THREADS": str(threads), SHARES_CORES: "1"}
    # Lightning's launcher starts the processes of each machine
    main = {"MASTER_ADDR": links.ADDRESSES[0], "MASTER_PORT": "29500"}
    own = {clock.CLOCK: str(file.fileno()), clock.NETWORK: json.dumps(network)}
    env = {**usual, **os.environ, **main, **own, "GLOO_SOCKET_IFNAME": links.DEVICE}
    with Popen(line, env=env, pass_fds=[file.fileno()], start_new_session=True) as link:
        while link.poll() is None:
            try:
                time.sleep(0.5)
                link.send_signal(signal.SIGCONT)  # it must not stay stopped for ever
            except KeyboardInterrupt:  # the first machine's process says how to go on
                link.send_signal(signal.SIGINT)
    if link.returncode >= 0:
        return link.returncode
    print(f"the link process, {links.describe_status(link.returncode)}: its machines ended with it")
    return 128 - link.returncode
