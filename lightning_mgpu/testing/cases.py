"""The promises, and the small runs of a Trainer that show them, in all processes of a strategy."""

import faulthandler
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lightning_mgpu.cli.errors import last_frame
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.testing.probe import Manual, Masked, Probe

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
EVEN, UNEVEN = (48, 12), (107, 24)  # samples, batch size: the last batch of UNEVEN has 11


class Run(NamedTuple):
    """The settings of a case. `directory` is for its files, `options` are the strategy's."""

    directory: str
    strategy: str
    devices: int
    accelerator: str
    options: dict[str, Any]
    timeout: float = 300.0  # seconds

    def trainer(self, **kwargs: Any) -> Trainer:
        strategy = make_strategy(self.strategy, **self.options)
        settings: dict[str, Any] = {**dict.fromkeys(OFF, False), "max_epochs": 2, **kwargs}
        settings |= {"devices": self.devices, "accelerator": self.accelerator}
        return Trainer(strategy=strategy, default_root_dir=self.directory, **settings)


def train(module: Callable[[], Probe], run: Run, resume: str = "", **options: Any) -> Any:
    """Train a module, and save it unless it goes on; returns its state, the same everywhere."""
    probe, trainer = module(), run.trainer(limit_val_batches=0, **options)
    trainer.fit(probe, ckpt_path=resume or None, weights_only=True)
    if not resume:
        trainer.save_checkpoint(Path(run.directory, run.strategy))
    for parameter in probe.to(trainer.strategy.root_device).parameters():
        if not (trainer.strategy.all_gather(parameter.detach()) == parameter).all():
            raise RuntimeError("the processes end with different parameters")
    return {name: value.detach().cpu() for name, value in probe.state_dict().items()}


def resume(run: Run) -> Any:
    """A checkpoint after an epoch, and a second epoch from the one that one device has saved."""
    train(ADAMW, run, max_epochs=1)
    saved = torch.load(Path(run.directory, run.strategy), map_location="cpu")
    resumed = train(ADAMW, run, resume=f"{run.directory}/auto")
    return [dict(saved["state_dict"]), saved["optimizer_states"], resumed]


PROBE, ADAMW = partial(Probe, EVEN), partial(Probe, EVEN, adamw=True)
MIXED = partial(Probe, (48, 10), norm=True, dropout=0.3, adamw=True)  # shards of 3, 3, 2, 2
SAME_BITS = "same bits with `replicas=4` on 1, 2 and 4 devices"
PROMISES: dict[str, Callable[[Run], Any]] = {
    "parameters": partial(train, PROBE),
    "uneven batches": partial(train, partial(Probe, UNEVEN)),
    "clipping": partial(train, PROBE, gradient_clip_val=0.1),
    "accumulation": partial(train, PROBE, accumulate_grad_batches=3),
    "schedulers": partial(train, ADAMW),
    "manual optimization": partial(train, partial(Manual, EVEN)),
    "sync_batchnorm": partial(train, partial(Probe, UNEVEN, norm=True), sync_batchnorm=True),
    "weight of a loss": partial(train, partial(Masked, EVEN)),
    "logging in evaluation": lambda run: run.trainer().validate(Probe(UNEVEN), verbose=False),
    "save and resume": resume,
    SAME_BITS: partial(train, MIXED),
}
"""Cases. All but the last must return what one device returns: tensors and numbers."""


def answer(name: str, run: Run) -> None:
    """Run a case in every process of a strategy; the first one prints a word and a note."""
    faulthandler.dump_traceback_later(run.timeout, exit=True)
    torch.set_num_threads(1)  # the order of sums inside an operation depends on it
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # Lightning's launcher sets it
    try:
        if is_first:  # before the strategy starts processes
            expected = PROMISES[name](run._replace(strategy="auto", devices=1, options={}))
        observed = PROMISES[name](run)
        if is_first and name == SAME_BITS:
            print("yes:", [value.tolist() for value in observed.values()], flush=True)
        elif is_first:
            torch.testing.assert_close(observed, expected, rtol=1e-10, atol=1e-10)
            print("yes:", flush=True)
    except (AssertionError, ValueError, MisconfigurationException) as error:
        is_raised = "raise " in last_frame(error)[1]  # else Python itself, and it is a defect
        is_line = not isinstance(error, AssertionError) and "\n" not in str(error).strip()
        print(
            "refused:" if is_raised and is_line else "no:", " ".join(str(error).split()), flush=True
        )
    os._exit(0)  # without waiting for processes that wait for this one
