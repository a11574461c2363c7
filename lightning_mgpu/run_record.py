"""What a run leaves of itself before it trains: configuration, model, code version, and its Weights & Biases run."""

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_mgpu.callbacks import RunHeader, run_directory
from lightning_mgpu.callbacks.console import model_table, run_facts
from lightning_mgpu.files import replace_text
from lightning_mgpu.redact import redact
from lightning_mgpu.tracking import Tracking, UploadBest, code_version, save_file, start_run


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
        config = redact(self.parser.dump(given, skip_none=False))
        if run_dir := run_directory(trainer):
            replace_text(run_dir / self.config_filename, config)
            replace_text(run_dir / "model.txt", model_table(pl_module) + "\n")
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            header.notes["wandb"] = "by --trainer.logger; of --wandb.* only watch and watch_freq count, --no-wandb not"
        elif run_dir and trainer.loggers:  # there is nothing to log with `--trainer.logger=false`
            resolved = yaml.safe_load(config)
            tracking = Tracking(**{**resolved["wandb"], **({"mode": "disabled"} if resolved["no_wandb"] else {})})
            run, where = start_run(tracking, run_dir, stage, resolved)
            if tracking.log_model and (run is None or run.offline):
                where += "; --wandb.log_model uploads nothing then, the checkpoints stay in the run directory"
            if run is not None:
                if tracking.log_model and not run.offline:
                    trainer.callbacks.append(UploadBest(run, tracking.finish_timeout))  # type: ignore[attr-defined]
                trainer.loggers = [*trainer.loggers, WandbLogger(experiment=run)]
                for name in ("config.yaml", "model.txt"):
                    save_file(run, run_dir / name, f"resolved_{name}")
            header.notes["wandb"] = where
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
