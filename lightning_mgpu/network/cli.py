"""How long is a step on several machines? Here each is a network namespace of this one.

    python -m lightning_mgpu network --machines 2 --delay_ms 20 --mbit 100 fit [options]

A machine has one CPU process, which reaches the other machines and nothing else. At the end a table
says what each has sent, and how long a step took, without the first 32.
"""

import os
import signal
import sys
from argparse import REMAINDER, Namespace
from subprocess import Popen
from tempfile import TemporaryFile

from lightning_mgpu.network import clock, links
from lightning_mgpu.tools import make_parser, program


def network_command(arguments: list[str]) -> None:
    parser = make_parser("network", __doc__)
    add = parser.add_argument
    add("--machines", type=int, metavar="N", default=2)
    add("--delay_ms", type=float, default=20, help="from one machine to another")
    add("--mbit", type=float, default=100, help="per second that each can send, and receive")
    add("fit", choices=["fit"], help="and its options")
    add("options", nargs=REMAINDER)
    args = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("network namespaces are Linux's")
    if args.mbit > 500:
        print(f"--mbit={args.mbit:g}: Python carries about 500 each way, so it may be less")
    status, measured = fit(args)
    if any(total for total, *_ in measured):
        if status:
            print(f"--resume here needs --trainer.num_nodes=1 --trainer.devices={args.machines}")
        print("| machine | MB sent | MB per step | link busy | ms per step | median |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for i, (total, mb, ms, median) in enumerate(measured):
            busy = 800e3 * mb / ms / args.mbit
            print(f"| {i} | {total:.2f} | {mb:.4f} | {busy:.0f} % | {ms:.1f} | {median:.1f} |")
    sys.exit(status)


def fit(args: Namespace) -> tuple[int, list[tuple[float, ...]]]:
    """Train on machines; returns the exit status, and what `read_steps` says of each machine."""
    line = [sys.executable, "-I", "-S", links.__file__, str(os.getpid()), str(args.machines)]
    line += [str(args.delay_ms), str(args.mbit), sys.executable, "-m", program(), "fit"]
    line += [f"--trainer.num_nodes={args.machines}", "--trainer.devices=1"]
    line += ["--trainer.accelerator=cpu", *args.options]
    if not any(option.startswith("--resume") for option in args.options):  # else the run has it
        line.append(f"--trainer.callbacks+={clock.__name__}.StepClock")
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.machines))
    usual = {"OMP_NUM_THREADS": threads, "WANDB_MODE": "offline", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = {"WORLD_SIZE": str(args.machines), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks |= {"MASTER_ADDR": links.ADDRESSES[0], "MASTER_PORT": "29500"}  # as torchrun sets them
    ranks |= {"TORCHELASTIC_RUN_ID": "network", "GLOO_SOCKET_IFNAME": links.DEVICE}
    with TemporaryFile("a+b", buffering=0) as file:
        env = {**usual, **os.environ, **ranks, clock.CLOCK: str(file.fileno())}
        with Popen(line, env=env, pass_fds=[file.fileno()], start_new_session=True) as link:
            try:
                link.wait()
            except KeyboardInterrupt:  # the first machine's process says how to go on
                link.send_signal(signal.SIGINT)
        return link.returncode, [clock.read_steps(file, i) for i in range(args.machines)]
