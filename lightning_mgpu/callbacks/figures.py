"""Pictures in the run directory. A picture that fails is a warning and never ends a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure

from lightning_mgpu.files import replacing
from lightning_mgpu.protocols import data_facts
from lightning_mgpu.runs.directory import make_run_dir_on_rank_zero


def save_picture(trainer: Trainer, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory and show it in Weights & Biases."""
    if (directory := make_run_dir_on_rank_zero(trainer)) is None:
        return
    path = directory / filename
    with replacing(path) as temporary_path:
        figure.savefig(temporary_path, dpi=110)
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])


@contextmanager
def picture_errors_as_warnings(filename: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{filename} is not right: {type(error).__name__}: {error}")


def label_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The data module's `classes`; numbers if there are none, or another number of them."""
    names = [str(name) for name in data_facts(trainer).classes or ()]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]
