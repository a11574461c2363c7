"""Runs a command on machines: `python -I links.py PARENT SPEEDUP DELAY_MS MBIT COMMAND...`.

DELAY_MS and MBIT contain a value per machine (1,1,40). SPEEDUP multiplies delays and divides
bandwidths, as if machines computed faster. The sender adds half of the delay, the receiver half.

A machine is a network namespace with a TUN device. Packets are read from one machine's device and
written to another's when an emulated link would deliver them. Only a single-threaded process can
create a user namespace, and NumPy starts threads: so this is a separate program, and uses only the
standard library. This program and all that it starts are killed when the process PARENT ends.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

DEVICE, MTU, ADDRESSES = "link", 9000, [f"10.0.0.{i}" for i in range(1, 65)]
END_WITH_PARENT = ("prctl", 1, signal.SIGKILL)  # also after an `exec`
SET_TUN, SET_FLAGS, SET_ADDRESS, SET_MASK, SET_MTU = 0x400454CA, 0x8914, 0x8916, 0x891C, 0x8922
NEW_USER, NEW_NETWORK, TUN, WITHOUT_HEADER, UP = 0x10000000, 0x40000000, 0x1, 0x1000, 0x1
Inbox = SimpleQueue[tuple[float, bytes]]  # per machine: arrival times and packets


def call(name: str, *args: int) -> None:
    """Call a function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(number := ctypes.get_errno(), f"{name}: {os.strerror(number)}")


def make_user_namespace() -> None:
    """Allow users other than root to create machines."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_USER)
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text)


def describe_status(status: int | None) -> str:
    """A readable exit status; a negative one means a signal."""
    name = f" ({signal.Signals(-status).name})" if status and status < 0 else ""
    return f"exit status {status}{name}"


def enter_machine(machine: int, speedup: float) -> int:
    """Enter a new network namespace, for processes started next; return its TUN device."""
    call("unshare", NEW_NETWORK)
    tun = os.open("/dev/net/tun", os.O_RDWR)  # the device is removed when this is closed
    fcntl.ioctl(tun, SET_TUN, struct.pack("16sH22x", DEVICE.encode(), TUN | WITHOUT_HEADER))
    own, mask = map(socket.inet_aton, (ADDRESSES[machine], "255.255.255.0"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, device, value in (
            (SET_ADDRESS, DEVICE, struct.pack("HH4s", socket.AF_INET, 0, own)),
            (SET_MASK, DEVICE, struct.pack("HH4s", socket.AF_INET, 0, mask)),
            (SET_MTU, DEVICE, struct.pack("i", MTU)),
            (SET_FLAGS, DEVICE, struct.pack("H", UP)),
            (SET_FLAGS, "lo", struct.pack("H", UP)),
        ):
            fcntl.ioctl(any_socket, request, struct.pack("16s24s", device.encode(), value))
    settings = {"tcp_rto_min_us": round(200_000 * speedup), "tcp_slow_start_after_idle": 0}
    for name, number in settings.items() if speedup != 1 else ():
        with suppress(OSError):  # missing in some kernels, read-only in some containers
            Path(f"/proc/sys/net/ipv4/{name}").write_text(str(number))
    return tun


def send(tun: int, inboxes: dict[bytes, Inbox], bytes_per_second: float, delay: float) -> None:
    """Send each packet once the link has transmitted all earlier packets, and its own bytes."""
    leaves = 0.0
    while True:
        packet = os.read(tun, 65536)
        now = time.monotonic()
        leaves = max(leaves, now) + len(packet) / bytes_per_second
        if inbox := inboxes.get(packet[16:20]):  # the IPv4 destination
            inbox.put((leaves + delay, packet))
        time.sleep(max(0.0, leaves - now - 0.02))  # early, as sleep() may overshoot


def receive(tun: int, inbox: Inbox, bytes_per_second: float, delay: float) -> None:
    """Deliver packets; all senders share the bandwidth of this machine."""
    received = 0.0
    while True:
        arrives, packet = inbox.get()
        received = max(arrives + delay, received + len(packet) / bytes_per_second)
        time.sleep(max(0.0, received - time.monotonic()))
        os.write(tun, packet)


def run(delays: list[float], rates: list[float], speedup: float, command: list[str]) -> int:
    """Run a command on each machine; the first one writes to the terminal."""
    if os.geteuid():
        make_user_namespace()
    outputs, tuns, workers = [TemporaryFile() for _ in delays], [], []  # noqa: SIM115
    options: Any = {"preexec_fn": lambda: call(*END_WITH_PARENT), "close_fds": False}
    for machine, output in enumerate(outputs):
        tuns.append(enter_machine(machine, speedup))
        options["env"] = {**os.environ, "NODE_RANK": str(machine)}
        files: Any = {"stdout": output, "stderr": output} if machine else {}
        workers.append(subprocess.Popen(command, **files, **options))
    signal.signal(signal.SIGINT, lambda *_: workers[0].send_signal(signal.SIGINT))
    inboxes = {socket.inet_aton(address): Inbox() for address in ADDRESSES[: len(delays)]}
    for tun, inbox, delay, rate in zip(tuns, inboxes.values(), delays, rates):
        link = rate / speedup * 1e6 / 8, speedup * delay / 1e3 / 2
        Thread(target=send, args=(tun, inboxes, *link), daemon=True).start()
        Thread(target=receive, args=(tun, inbox, *link), daemon=True).start()
    while workers[0].poll() is None and not any(worker.poll() for worker in workers):
        time.sleep(0.05)
    # if the first fails, so do the others; without a failure, W&B may need half a minute to end
    end = time.monotonic() + (0.5 if workers[0].returncode else 30)
    while None in (statuses := [worker.poll() for worker in workers]) and time.monotonic() < end:
        time.sleep(0.05)
    for machine, (status, output) in enumerate(zip(statuses, outputs)):
        is_late = status is None and not statuses[0]
        if is_late or (status and (machine or status < 0)):  # the first prints its own errors
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-10:]
            print(f"machine {machine}, {describe_status(status)}:", *lines, sep="\n  ")
    used, waited = time.process_time(), seconds_without_core("task/*/schedstat")
    short = f", and waited {waited:.1f} s for a core; if no machine had to, use a larger --speedup"
    print(f"The links used {used:.1f} s of CPU time{short * (used < 9 * waited)}.", flush=True)
    return next(filter(None, statuses), int(None in statuses))


def seconds_without_core(pattern: str) -> float:
    """Seconds that runnable threads of this process have waited for a core, from schedstat."""
    return sum(int(f.read_text().split()[1]) for f in Path("/proc/self").glob(pattern)) / 1e9


if __name__ == "__main__":
    parent, speedup, *lists = sys.argv[1:5]
    delays, rates = ([*map(float, text.split(","))] for text in lists)
    call(*END_WITH_PARENT)
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    try:
        status = run(delays, rates, float(speedup), sys.argv[5:])
        sys.exit(status if status >= 0 else 128 - status)  # as in a shell
    except OSError as error:
        sys.exit(f"error: {error} (machines need /dev/net/tun, and root or user namespaces)")
