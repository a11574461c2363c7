"""Machines on this machine: their links, a run on them, and what is left when something ends."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import pytest

from lightning_mgpu.lab.network import cli, clock
from lightning_mgpu.lab.network.clock import WARM_UP
from lightning_mgpu.lab.network.steps import COLUMNS, Steps
from tests.test_bits import fingerprint

REPOSITORY = Path(__file__).parents[3]
LINKS = REPOSITORY / "lightning_mgpu" / "lab" / "network" / "links.py"
FIT = (
    *("fit", "--data.source=synthetic", "--trainer.max_epochs=2", "--model.optimizer=AdamW"),
    *("--trainer.limit_train_batches=36", "--trainer.limit_val_batches=2", "--output.test=false"),
    *("--output.curve=false", "--trainer.strategy=manual_allreduce"),
    "--trainer.strategy.replicas=4",
)
FAST = ("network", "--delay_ms=0.5", "--mbit=500")
ON_ONE = ("--trainer.accelerator=cpu", "--trainer.num_nodes=1", "--trainer.devices=1")
# machine 0 times round trips and then pieces of 2 MB; machine 1 sends back, and then sends
TALK = """
import json, os, socket, time
if os.environ["NODE_RANK"] == "0":
    peer = socket.create_server(("10.0.0.1", 5000)).accept()[0]
    times = []
    for _ in range(10):
        start = time.monotonic()
        peer.sendall(b"?")
        peer.recv(1)
        times.append(time.monotonic() - start)
    for _ in range(10):
        start, left = time.monotonic(), 2_000_000
        while left:
            left -= len(peer.recv(min(left, 1 << 16)))
        times.append(time.monotonic() - start)
    print(json.dumps(times))
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(("10.0.0.1", 5000))
            break
        except OSError:
            time.sleep(0.1)
    for _ in range(10):
        peer.sendall(peer.recv(1))
    peer.sendall(bytes(20_000_000))
    peer.recv(1)
"""


def run_on_links(*args):
    """Run a program on machines, as the command does."""
    line = [sys.executable, "-I", "-S", str(LINKS), str(os.getpid()), *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="session")
def machines():
    """Skips where none can be made; the program says in one line what is missing."""
    done = run_on_links(1, "0,0", "100,100", "true")
    if done.returncode:
        assert re.fullmatch(r"error: .* \(machines need /dev/net/tun, and .*\)\n", done.stderr)
        assert "No such file" not in done.stderr or "'/dev/net/tun'" in done.stderr
        pytest.skip(done.stderr)


def children(process):
    """The processes that one has started, in their order."""
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def test_steps_are_measured_in_whole_windows_within_epochs(tmp_path, capsys):
    """The first step of an epoch has no times. Here machines are twice as fast, every is 3."""
    file = io.BytesIO()
    file.write(b"run runs/my run\nspan 0 forward 7 8\nstep 0 0 nan nan nan 1e6 nan nan 3\n")
    times = ["nan", *[1.0] * WARM_UP, 0.01, 0.01, 0.07, "nan", 0.01, 0.01, 0.07, 0.01]
    for batch, seconds in enumerate(times):
        num_bytes = 1e3 if seconds in ("nan", 1.0) else 1e6
        half = float(seconds) / 2
        others = f"{seconds} {half} nan {num_bytes} {half} {half / 2} 3"
        file.write(f"step 1 {batch} {others}\n".encode())
    steps = Steps(file, speedup=2)
    assert steps.run == Path("runs/my run") and Steps(io.BytesIO()).run is None
    steps.print_table([100, 100])
    _, _, first, second, *hint = capsys.readouterr().out.splitlines()
    assert first == "| 0 | 1.00 | not measured: too few steps after the first 32 |"
    assert second == "| 1 | 7.03 | 1.0000 | 533 % | 15.0 | 5.0 |  |"
    assert "divided by 2" in hint[0] and "machine 1 had 0.67 of one" in hint[1]
    steps.write_csv(str(tmp_path / "steps.csv"))
    lines = (tmp_path / "steps.csv").read_text().split()
    assert lines[:3] == [",".join(COLUMNS), "0,0,,,,1", "1,0,,,,0.001"]
    assert lines[3 + WARM_UP] == f"1,{1 + WARM_UP},5,2.5,,1"
    (axes,) = steps.draw().axes
    assert "ms (F = 2)" in axes.get_xlabel() and axes.dataLim.intervalx.tolist() == [0, 500]


def test_a_slow_machine_sleeps_as_long_as_it_computes(monkeypatch):
    """Twice as long, if it is to be three times as slow. CPU time in `wait` does not count."""
    monkeypatch.setenv(clock.CLOCK, str(file := os.memfd_create("steps")))
    monkeypatch.setenv(clock.NETWORK, '{"slowdown": [1, 3]}')
    monkeypatch.setattr(clock, "DEVICE", "lo")
    monkeypatch.setattr(clock.time, "sleep", sleep := mock.MagicMock())
    monkeypatch.setattr(clock.time, "thread_time", lambda: control.cpu_seconds_in_wait + 7)
    control = mock.MagicMock(cpu_seconds_in_wait=0.0, seconds_in_wait=0.0)
    strategy = mock.MagicMock(control=control, sync_every=1)
    trainer = mock.MagicMock(node_rank=1, local_rank=0, callbacks=[], strategy=strategy)
    trainer.accumulate_grad_batches = 1
    step_clock = clock.StepClock()
    step_clock.on_train_start(trainer, mock.MagicMock())
    control.cpu_seconds_in_wait = 5.0
    monkeypatch.setattr(clock.time, "thread_time", lambda: control.cpu_seconds_in_wait + 9)
    step_clock.on_train_batch_end(trainer, None, None, None, 0)
    sleep.assert_called_once_with(4)
    assert os.pread(file, 99, 0).startswith(b"step 1 0 nan nan nan ")


def test_a_link_has_the_delay_and_the_rate(machines):
    """Within 20 percent of 20 ms each way and 100 Mbit/s, in one of three tries.

    Machines that are twice as fast have half the delay, a mean of two, and twice the slower rate.
    """
    for _ in range(3):
        done = run_on_links(2, "5,15", "200,800", sys.executable, "-c", TALK)
        assert done.returncode == 0, done.stdout
        times = json.loads(done.stdout.splitlines()[0])
        found = median(times[:10]) / 0.040, median(times[13:]) / (2 / 12.5)  # TCP starts slowly
        if max(found) < 1.2:
            break
    assert min(found) > 0.8 and max(found) < 1.2


def test_statuses_and_last_lines(machines):
    """Of the first machine that fails; those of one that is ended do not count."""
    script = "echo from $NODE_RANK; [ $NODE_RANK = 0 ] || exit $NODE_RANK"
    done = run_on_links(1, "0,0,0", "100,100,100", "sh", "-c", script)
    assert done.returncode == 1
    assert "machine 1, exit status 1:\n  from 1\nmachine 2, exit status 2:\n" in done.stdout
    done = run_on_links(1, "0,0", "100,100", "sh", "-c", "[ $NODE_RANK = 1 ] || exit 3; sleep 60")
    assert done.returncode == 3 and "exit status" not in done.stdout
    done = run_on_links(
        1, "0,0", "100,100", "sh", "-c", "[ $NODE_RANK = 1 ] || kill -9 $$; sleep 60"
    )
    assert done.returncode == 137 and "machine 0, exit status -9 (SIGKILL):" in done.stdout


# a package whose `fit` has saved a checkpoint, and trains on until a signal comes
STUB = f"""
import os, sys, time
from pathlib import Path

if sys.argv[1] == "network":
    from lightning_mgpu.cli.main import main
    main()
elif os.environ["NODE_RANK"] == "0":
    os.write(int(os.environ[{clock.CLOCK!r}]), b"run run\\n")
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/last.ckpt").touch()
try:
    time.sleep(99)
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_training(command):
    """The command, when its first epoch is saved, and the process of each machine."""
    (command.cwd / "stub").mkdir()
    (command.cwd / "stub/__main__.py").write_text(STUB)
    process = command.start(*FAST, "fit", launcher=("-m", "stub"))
    while not (command.cwd / "run/checkpoints/last.ckpt").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    (link,) = children(process.pid)
    return process, children(link)


@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_two_machines(command, machines, main, capfd):
    files = "--csv=steps.csv", "--picture=steps.png"
    code, out, err = command(*FAST, *files, *FIT, "--run_dir=run", timeout=200)
    assert code == 0, f"{out}\n{err}"
    capfd.readouterr()
    assert main(*FIT, *ON_ONE) == 0 and fingerprint(out) == fingerprint(capfd.readouterr().out)
    assert len((command.cwd / "steps.csv").read_text().split()) == 1 + 2 * 2 * 36
    assert (command.cwd / "steps.png").read_bytes()[:4] == b"\x89PNG"
    assert "sent_mb" in (command.cwd / "run/metrics.csv").read_text()
    rows = re.findall(r"^\| (\d) \| \S+ \| (\S+) \| \d+ % \| .*\d \|$", out, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(float(row[1]) > 129_068 * 4 / 1e6 for row in rows)  # LeNet's gradients


def test_the_command_of_the_page(main, monkeypatch, capsys):
    """The command takes it, and `fit` takes what the command adds."""
    pytest.importorskip("lightning_mgpu.exchanges")  # its commands use these, which can be deleted
    page = (REPOSITORY / "docs" / "network.md").read_text()
    lines = re.findall("^python -m lightning_mgpu (network .*)", page, flags=re.MULTILINE)
    monkeypatch.setattr(cli, "Popen", started := mock.MagicMock())
    started.return_value.__enter__.return_value.returncode = 3
    assert {main(*line.split()) for line in lines} == {3}
    (command,) = started.call_args_list[0].args
    assert command[5:8] == ["1.0", "20.0,20.0", "100.0,100.0"]
    assert main(*command[command.index("fit") :], "--print_config") == 0
    printed = capsys.readouterr().out
    assert "num_nodes: 2" in printed and "lightning_mgpu.lab.network.clock.StepClock" in printed


@pytest.mark.slow
def test_a_link_process_that_stops_or_ends(command, machines):
    """The link process resumes. If it is killed, so is the command, and prints how to resume."""
    process, _ = start_training(command)
    (link,) = children(process.pid)
    os.kill(link, signal.SIGSTOP)
    time.sleep(2)
    assert Path(f"/proc/{link}/stat").read_text().rpartition(") ")[2][0] != "T"
    os.kill(link, signal.SIGKILL)
    code, out, _ = command.finish(process, timeout=100)
    assert code == 137 and "fit --resume=run (without network, add" in out, out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.weekly)],
)
def test_an_ended_command_leaves_nothing(number, status, command, machines):
    """No process is in the namespaces: then these are gone, and so are their TUN devices."""
    process, workers = start_training(command)
    spaces = {os.readlink(f"/proc/{each}/ns/net") for each in workers}
    assert len(spaces) == 2 and spaces <= namespaces()
    process.send_signal(number)
    code, out, err = command.finish(process, timeout=60)
    assert code == status, f"{out}\n{err}"
    end = time.monotonic() + 5
    while time.monotonic() < end and spaces & namespaces():
        time.sleep(0.1)
    assert not spaces & namespaces()


def namespaces():
    """The network namespaces of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return found


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("--mbit=9,9,9", "fit"), "--mbit: 3 values; use 1, or 2 with commas"),
        (("--mbit=9 9", "fit"), "argument --mbit: invalid numbers value: '9 9'"),
        (("--csv=none/a.csv", "fit"), "/none/a.csv: use a .csv file in an existing directory"),
        (("--picture=a.bad", "fit"), "/a.bad: use a .png file in an existing directory"),
        (("test",), "argument fit: invalid choice: 'test'"),
    ],
)
def test_mistakes(args, hint, main, capsys):
    assert main("network", *args) == 2
    assert hint in capsys.readouterr().err
