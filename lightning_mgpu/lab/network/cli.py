"""Train on emulated machines, which are network namespaces, and measure the time per step.

    python -m lightning_mgpu network --machines 2 --delay_ms 20 --mbit 100 fit [options]

A machine runs one CPU process, or several with `--trainer.strategy.replicas`, and reaches only the
other machines. A final table shows the MB sent, and the time per step after 32 warm-up steps.
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

LISTS = ("delay_ms", "mbit", "slowdown")  # one value, or one per machine


def network_command(arguments: list[str]) -> None:
    parser = make_parser("network", __doc__)
    add = parser.add_argument
    add("--machines", type=int, metavar="N", default=2, help="number of machines (default: 2)")
    fast = "emulate devices F times as fast as one core (default: 1)"
    add("--speedup", type=float, metavar="F", default=1.0, help=fast)
    many: Any = {"type": numbers, "metavar": "X[,X...]"}
    add("--delay_ms", **many, default=[20.0], help="latency in ms, half at each end (default: 20)")
    add("--mbit", **many, default=[100.0], help="bandwidth per direction, Mbit/s (default: 100)")
    add("--slowdown", **many, default=[1.0], help="make computation X times slower (default: 1)")
    add("--csv", help="CSV file for the times of all steps, a row per machine and step")
    add("--picture", help="PNG file for a timeline of some steps")
    add("fit", choices=["fit"], help="subcommand to run, followed by its options")
    # options after `fit` are parsed by `fit`
    end = arguments.index("fit") + 1 if "fit" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    args.options = arguments[end:]
    for name in LISTS:
        values = getattr(args, name)
        if len(values) not in (1, args.machines):
            parser.error(f"--{name}: {len(values)} values; use 1, or {args.machines} with commas")
        setattr(args, name, (values * args.machines)[: args.machines])
    for option, suffix in (("csv", ".csv"), ("picture", ".png")):
        value = getattr(args, option)
        path = Path(f"none{suffix}" if value is None else value).absolute()
        if path.suffix != suffix or not path.parent.is_dir():
            parser.error(f"--{option}={path}: use a {suffix} file in an existing directory")
    if sys.platform != "linux":
        parser.error("emulated machines need Linux")
    if (rate := max(args.mbit) / args.speedup) > 500:
        print(f"--mbit: the links need {rate:g} Mbit/s, but may reach only about 500 (Python)")
    with TemporaryFile("a+b", buffering=0) as file:
        status = fit(args, file)
        steps = Steps(file, args.speedup)
    if len(steps.rows):
        steps.print_table(args.mbit)
        if args.csv:
            steps.write_csv(args.csv)
    elif not status:
        print("no step was measured: none was run, or the run was started without `network`")
    if args.picture and steps.spans:
        steps.draw().savefig(args.picture, dpi=110)
    elif args.picture:
        print(f"{args.picture} is not written: no step after the first {clock.WARM_UP}")
    if status:
        print(how_to_resume(args.machines, steps.run))
    sys.exit(status)


def numbers(text: str) -> list[float]:
    """One value for all machines, or one per machine, separated by commas."""
    return [*map(float, text.split(","))]


def how_to_resume(machines: int, run: Path | None) -> str:
    if run is None or not (run / "checkpoints" / LAST).is_file():
        return "start again"
    on_one = f"without network, add --trainer.num_nodes=1 --trainer.devices={machines}"
    resume = f"network --machines={machines} fit --resume={shlex.quote(os.path.relpath(run))}"
    return f"resume with: {command()} {resume} ({on_one})"


def fit(args: Namespace, file: IO[bytes]) -> int:
    """Train on emulated machines; StepClocks write to `file`. Returns the exit status."""
    network = {name: getattr(args, name) for name in ("machines", "speedup", *LISTS)}
    line = [sys.executable, "-I", "-S", links.__file__, str(os.getpid()), str(args.speedup)]
    line += [*(",".join(map(str, network[n])) for n in ("delay_ms", "mbit"))]
    line += [sys.executable, "-m", program(), "fit"]
    line += [f"--trainer.num_nodes={args.machines}", "--trainer.devices=1"]
    line += ["--trainer.accelerator=cpu", *args.options]
    if not any(option.startswith("--resume") for option in args.options):  # else in its config
        line.append(f"--trainer.callbacks+={clock.__name__}.StepClock")
    usual = {"WANDB_MODE": "offline", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "OMP_NUM_THREADS" not in os.environ:  # replicas divide the threads
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
                link.send_signal(signal.SIGCONT)  # resume it if it was stopped
            except KeyboardInterrupt:  # the first machine's process prints how to resume
                link.send_signal(signal.SIGINT)
    if link.returncode >= 0:
        return link.returncode
    print(f"link process: {links.describe_status(link.returncode)}; its machines were killed")
    return 128 - link.returncode
