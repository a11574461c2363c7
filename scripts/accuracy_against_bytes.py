"""Train LeNet with each exchange on emulated machines, and plot its accuracy.

    python scripts/accuracy_against_bytes.py --rows ddp top_k my_exchange.my_exchange
    python scripts/accuracy_against_bytes.py --links 5,400 --speedup 4 --seeds 0 1 2 --rows ddp \\
        "DiLoCo, every 32=--trainer.strategy=exchange_diloco --trainer.strategy.sync_every=32"

Rows and links are as in `exchanges_on_links.py`: a row is a name, the path of an exchange, or a
label and options. Other options are passed to every `fit`; by default it trains with AdamW and a
learning rate of 0.002. Run directories are created in --out. Finished runs with the same options,
link, F, seed and version are reused, so the same command continues after a kill. The version is a
checksum of the Python files of the package, of the working directory and of PYTHONPATH, including
their subdirectories. After each run the script writes runs.csv (a line per run), curves.csv (a line
per evaluation) and accuracy.png: validation accuracy against the MB sent per machine, and against
the seconds of training and evaluation, divided by `--speedup`.
"""

import csv
import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from exchanges_on_links import find_row, make_parser, network_line, read_table, run_network
from matplotlib.figure import Figure

import lightning_mgpu
from lightning_mgpu.cli.errors import one_line_errors
from lightning_mgpu.cli.main import hide_messages
from lightning_mgpu.cli.options import read_options
from lightning_mgpu.cli.training_cli import TrainingCLI
from lightning_mgpu.runs.metrics import read_rows
from lightning_mgpu.tools import UsageError

OPTIONS = (
    *("--model.optimizer=AdamW", "--model.optimizer.lr=0.002", "--model.lr=null"),
    *("--output.curve=false", "--output.pictures=false", "--trainer.enable_checkpointing=false"),
    *("--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false"),
    # multiples of 16, the default of sync_every: evaluations cause no extra synchronization
    *("--trainer.limit_train_batches=144", "--trainer.val_check_interval=48"),
    "--trainer.limit_val_batches=8",
)
NAMES = ("ddp", "manual_allreduce", "top_k", "power_sgd", "local_sgd", "diloco")
RESULT = "result.json"  # in the directory of a finished run


def find_version() -> str:
    """A checksum of the package, and of the user's Python files."""
    files = {*Path(lightning_mgpu.__file__).parent.rglob("*.py")}
    for folder in (".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        files |= {*Path(folder).glob("*.py"), *Path(folder).glob("*/*.py")}
    return digest("".join(path.read_text() for path in sorted(files)))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_options(line: list[str]) -> None:
    """Exit before training if options disable values that this script reads."""
    with one_line_errors(False):
        options = read_options("fit", line[line.index("fit") + 1 :])
        config = TrainingCLI("fit", options).config  # parses, and seeds this process
        os.environ.pop("PL_GLOBAL_SEED", None)
        trainer = config.trainer
        if config.output.test is False:
            raise UsageError("--output.test=false: the test accuracy is needed; omit it")
        for name in ("limit_val_batches", "limit_test_batches", "logger"):
            if trainer[name] in (0, False):
                raise UsageError(f"--trainer.{name}={trainer[name]}: its values are needed")
        if trainer.fast_dev_run:
            raise UsageError("--trainer.fast_dev_run: it writes no metrics; omit it")
        num, every = trainer.limit_train_batches, trainer.val_check_interval
        if isinstance(num, int) and isinstance(every, int) and num < every:
            reason = f"fewer batches than --trainer.val_check_interval={every}"
            raise UsageError(f"--trainer.limit_train_batches={num}: {reason}")


def train(out: Path, label: str, line: list[str], about: dict[str, Any]) -> dict[str, Any]:
    """The results of a run, from its directory if it has finished."""
    name = "".join(letter if letter.isalnum() else "_" for letter in label)
    run = out / f"{name}_{digest(json.dumps([line, about['version']]))}"
    if not (run / RESULT).exists():
        shutil.rmtree(run, ignore_errors=True)  # of an unfinished run
        output = run_network([f"--csv={run}.csv", *line, f"--run_dir={run}"])
        Path(f"{run}.csv").rename(run / "steps.csv")
        (run / "output.txt").write_text(output)
        _, mb, ms = read_table(output)
        found = {"mb_per_step": mb, "ms_per_step": ms, "line": shlex.join(line)}
        found["cores_are_short"] = "CPU cores are scarce" in output
        (run / RESULT).write_text(json.dumps(about | found, indent=2))
    rows = read_rows(run)
    names = "seconds", "sent_mb", "val_acc", "step"
    points = [[row[name] for name in names] for row in rows if row.get("val_acc")]
    test = next((float(row["test_acc"]) for row in rows if row.get("test_acc")), None)
    if test is None or not points:
        sys.exit(f"{run}: the model must log val_acc and test_acc, like Classifier")
    curve = np.array(points, float) / (about["speedup"], 1, 1, 1)
    seconds, mb, val_acc, _ = curve[-1].round(4).tolist()
    last = {"seconds": round(seconds, 1), "mb": mb, "val_acc": val_acc, "test_acc": round(test, 4)}
    known = json.loads((run / RESULT).read_text())
    return {"run": run.name, "label": label, **known, **last, "curve": curve}


def write_csv(path: Path, found: list[dict[str, Any]]) -> None:
    """A line per run."""
    with path.open("w", newline="") as file:
        names = [name for name in found[0] if name != "curve"]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)


def write_curves(path: Path, found: list[dict[str, Any]]) -> None:
    """A line per evaluation."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "link", "seed", "step", "seconds", "mb", "accuracy"])
        for run in found:
            for seconds, mb, accuracy, step in run["curve"].tolist():
                row = [int(step) + 1, round(seconds, 3), round(mb, 6), accuracy]
                writer.writerow([run["label"], run["link"], run["seed"], *row])


def draw(found: list[dict[str, Any]]) -> Figure:
    """Draw two panels per link; lines are means over seeds, bands their range."""
    links = [*dict.fromkeys(run["link"] for run in found)]
    labels = [*dict.fromkeys(run["label"] for run in found)]
    figure = Figure(figsize=(11, 4.2 * len(links)), layout="constrained")
    panels = figure.subplots(len(links), 2, sharey=True, squeeze=False)
    for link, (by_mb, by_seconds) in zip(links, panels):
        for number, label in enumerate(labels):
            curves = [e["curve"] for e in found if (e["link"], e["label"]) == (link, label)]
            if not curves:
                continue
            length = min(map(len, curves))  # runs with different options may have fewer points
            curves = np.stack([curve[:length] for curve in curves])
            seconds, mb, accuracy, _ = curves.mean(0).T
            for axes, x in ((by_mb, mb), (by_seconds, seconds)):
                style = {"color": f"C{number}", "marker": "os^vDPX*"[number % 8], "markersize": 4}
                axes.plot(x, accuracy, label=label, **style)
                low, high = curves[:, :, 2].min(0), curves[:, :, 2].max(0)
                axes.fill_between(x, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        delay, mbit, machines = (*link.split(","), "2")[:3]
        title = f"{machines} emulated machines, {delay} ms and {mbit} Mbit/s"
        if (speedup := found[0]["speedup"]) != 1:
            title += f", {speedup:g} times as fast as a core"
        by_mb.set(xscale="log", xlabel="MB sent per machine", ylabel="validation accuracy")
        by_mb.set_title(title, loc="left", fontsize=10)
        seeds = ", ".join(sorted({str(run["seed"]) for run in found}))
        by_seconds.set_title(f"mean and range; seeds: {seeds}", loc="right", fontsize=10)
        is_short = any(run.get("cores_are_short") for run in found)
        reason = "\n(CPU cores were scarce: do not trust them)" if is_short else ""
        by_seconds.set(xlabel=f"seconds of training, with its evaluations{reason}")
        by_seconds.set_xlim(left=0)
        by_seconds.legend(loc="lower right", fontsize=8)
        for axes in (by_mb, by_seconds):
            axes.grid(alpha=0.4)
    return figure


def print_table(found: list[dict[str, Any]]) -> None:
    print("| exchange | link | MB per machine | ms per step | seconds | test accuracy |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for label, link in dict.fromkeys((run["label"], run["link"]) for run in found):
        runs = [run for run in found if (run["label"], run["link"]) == (label, link)]
        mb, ms, seconds = (mean(e[n] for e in runs) for n in ("mb", "ms_per_step", "seconds"))
        tests = ", ".join(f"{run['test_acc']:.3f}" for run in runs)
        print(f"| {label} | {link} | {mb:.2f} | {ms:.0f} | {seconds:.0f} | {tests} |")
    if short := [run["run"] for run in found if run["cores_are_short"]]:
        print(f"CPU cores were scarce, so do not trust the seconds of: {', '.join(short)}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=NAMES, help="rows to train")
    parser.add_argument("--machines", type=int, default=2, help="number of machines (default: 2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="random seeds")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of 144 batches (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("accuracy_against_bytes"))
    args, options = parser.parse_known_args()
    labels = {row: find_row(row)[0] for row in args.rows}
    args.out.mkdir(parents=True, exist_ok=True)
    found = []
    version, own = find_version(), [*OPTIONS, f"--trainer.max_epochs={args.epochs}", *options]
    links = [link if link.count(",") > 1 else f"{link},{args.machines}" for link in args.links]
    hide_messages()
    for row in labels:
        check_options(network_line(row, links[0], own, args.images, args.speedup))
    for seed in args.seeds:  # outermost: an early picture shows all rows
        for link in links:
            for row, label in labels.items():
                given = [f"--seed_everything={seed}", *own]
                line = network_line(row, link, given, args.images, args.speedup)
                about = {"link": link, "speedup": args.speedup, "seed": seed, "version": version}
                found.append(train(args.out, label, line, about))
                print("{run}: {seconds} s, test_acc {test_acc}".format(**found[-1]), flush=True)
                write_csv(args.out / "runs.csv", found)
                write_curves(args.out / "curves.csv", found)
                draw(found).savefig(args.out / "accuracy.png", dpi=110)
    print_table(found)
    names = ("accuracy.png", "curves.csv", "runs.csv")
    print(f"written: {', '.join(str(args.out / name) for name in names)}")


if __name__ == "__main__":
    main()
