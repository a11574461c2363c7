"""A model that logs under names of its own."""

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD


class Named(LightningModule):
    """Logs under names of its own; in epochs 2 and 3 nothing is validated."""

    def __init__(
        self, in_bar: tuple[str, ...], others: tuple[str, ...], in_validation: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.net, self.in_bar, self.others, self.in_validation = (
            nn.Linear(1, 1),
            in_bar,
            others,
            in_validation,
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_dict(dict.fromkeys(self.in_bar, 1.0), prog_bar=True, on_step=False, on_epoch=True)
        self.log_dict(dict.fromkeys(self.others, 1.0), on_step=True, on_epoch=True)
        return self.net(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_dict(dict.fromkeys(self.in_validation, 2.0))

    def on_train_epoch_end(self) -> None:
        self.trainer.check_val_every_n_epoch = 4

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), 0.1)
