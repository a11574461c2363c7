"""What a run leaves of itself before it trains: configuration, model, code version, and its Weights & Biases run."""

from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_mgpu.callbacks import RunHeader
from lightning_mgpu.callbacks.console import model_table, run_facts
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.git import code_version
from lightning_mgpu.runs.redact import redact_values
from lightning_mgpu.runs.wandb_run import Tracking, save_file, start_run


class RunRecord(SaveConfigCallback):
    """Saves the resolved configuration, starts W&B and records what runs, once the data are there and before training.

    Made with `save_to_log_dir=False`: Lightning would write the configuration as it is, secrets and all.
    """

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called in the first process only."""
        header = next(c for c in trainer.callbacks if isinstance(c, RunHeader))  # type: ignore[attr-defined]
        facts = {**run_facts(trainer, pl_module, header.is_global), **header.scaled, **code_version(type(pl_module))}
        given = self.config.clone()
        given.run_dir = None  # whoever repeats the run has another
        config: dict[str, Any] = redact_values(yaml.safe_load(self.parser.dump(given, skip_unset=False)))
        run_dir = run_directory(trainer)
        assert run_dir is not None  # a fast_dev_run has no record
        replace_text(run_dir / self.config_filename, yaml.safe_dump(config, sort_keys=False))
        replace_text(run_dir / "model.txt", model_table(pl_module) + "\n")
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            header.notes["wandb"] = "by --trainer.logger; of --wandb.* only watch and watch_freq count, --no-wandb not"
        elif trainer.loggers:  # there is nothing to log with `--trainer.logger=false`
            tracking = Tracking(**{**config["wandb"], **({"mode": "disabled"} if config["no_wandb"] else {})})
            run, where = start_run(tracking, run_dir, stage, config)
            if tracking.log_model and (run is None or run.offline):
                where += "; --wandb.log_model uploads nothing then, the checkpoints stay in the run directory"
            if run is not None:
                trainer.loggers = [*trainer.loggers, WandbLogger(experiment=run)]
                for name in (self.config_filename, "model.txt"):
                    save_file(run, run_dir / name, f"resolved_{name}")
            header.notes["wandb"] = where
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
