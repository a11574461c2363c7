"""Trains LeNet under each exchange on two emulated machines, and draws its test accuracy.

    python scripts/accuracy_against_bytes.py sign my_exchange.my_exchange --trainer.max_epochs=1

A link has 20 ms each way and 100 Mbit/s. The machines train on real images for two epochs, with
seeds 0 and 1. A row is a name of `exchanges_on_links.py`, or the path of an exchange of your own.
Without names those of docs/exchanges.md are made. Other options go to every run. It prints a table,
and draws accuracy_against_bytes.png: against the MB that a machine sends, and against seconds of
training.
"""

import csv
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from exchanges_on_links import fit
from matplotlib.figure import Figure

LINK = "20,100"
OPTIONS = (
    *("--trainer.max_epochs=2", "--model.optimizer=AdamW", "--model.optimizer.lr=0.002"),
    *("--model.lr=null", "--output.curve=false", "--output.pictures=false"),
    *("--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false"),
)
MARKERS = "os^vDPX*"  # some dots lie on others
NAMES = ("ddp", "manual_allreduce", "top_k", "power_sgd", "local_sgd", "diloco")


def train(row: str, seed: int, options: list[str]) -> tuple[float, float, float]:
    """MB that a machine sends, seconds of training, and test accuracy in the end."""
    with TemporaryDirectory() as run:
        own = [f"--seed_everything={seed}", f"--run_dir={run}"]
        megabytes, *_ = fit(row, LINK, *OPTIONS, *options, *own)
        rows = [*csv.DictReader(Path(run, "metrics.csv").read_text().splitlines())]
    seconds = sum(float(each["epoch_seconds"] or 0) for each in rows)
    return megabytes, seconds, next(float(each["test_acc"]) for each in rows if each["test_acc"])


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name")
    args, options = parser.parse_known_args()
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    panels[0].set(xscale="log", xlabel="MB sent per machine", ylabel="test accuracy")
    panels[1].set(xlabel="seconds of training")
    figure.suptitle("LeNet on two emulated machines, 20 ms and 100 Mbit/s: a dot per seed")
    print("| exchange | MB per machine | seconds | test accuracy, two seeds |")
    print("| --- | ---: | ---: | --- |")
    for number, row in enumerate(args.names or NAMES):
        found = [train(row, seed, options) for seed in (0, 1)]
        megabytes, seconds, accuracies = zip(*found)
        both = ", ".join(f"{each:.3f}" for each in accuracies)
        print(f"| {row} | {mean(megabytes):.2f} | {mean(seconds):.0f} | {both} |", flush=True)
        for axes, values in zip(panels, (megabytes, seconds)):
            # two seeds are two dots: a line would look like a trend
            axes.plot(values, accuracies, MARKERS[number % len(MARKERS)], label=row, alpha=0.7)
    panels[1].set_xlim(left=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig("accuracy_against_bytes.png", dpi=110)


if __name__ == "__main__":
    main()
