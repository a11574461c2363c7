"""The language model of docs/adding.md, against plain PyTorch with one big batch."""

from typing import Any

from lightning.pytorch import LightningModule, seed_everything

from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.test_adding import FILES

WINDOW, NUM_BATCHES = 128, 4


def train_by_hand(page: dict[str, Any]) -> LightningModule:
    """Two epochs of the model in plain PyTorch."""
    seed_everything(0, verbose=False)
    module = page["LanguageModel"]().double()
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    loader = page["Texts"](WINDOW).train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            module.training_step(batch, 0)["loss"].backward()
            optimizer.step()
    return module


def test_one_big_batch(make_trainer: Any) -> None:
    page: dict[str, Any] = {"__name__": "my_language_model"}
    # half of the texts take half the time
    exec(FILES["my_text.py"].replace("3000", "1500") + FILES["my_language_model.py"], page)
    expected = train_by_hand(page)

    class Without(page["LanguageModel"]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    rows = ["| replicas | batches per update | with the weight | without it |"]
    rows += ["| --: | --: | --: | --: |"]
    for num_replicas in (1, 2, 3):
        for num_batches in (1, NUM_BATCHES):
            found = []
            for make in (page["LanguageModel"], Without):
                seed_everything(0, verbose=False)
                module = make().double()
                trainer = make_trainer(
                    strategy=ManualAllreduceStrategy(replicas=num_replicas),
                    max_epochs=2,
                    accumulate_grad_batches=num_batches,
                )
                trainer.fit(module, datamodule=page["Texts"](WINDOW // num_batches))
                pairs = zip(module.cpu().parameters(), expected.parameters())
                found.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
                assert trainer.callback_metrics["loss_per_token"] < 2, "it learns: 2.4 is chance"
            assert found[0] < 1e-10
            assert found[1] > 1e-4 or num_replicas == num_batches == 1
            rows.append(f"| {num_replicas} | {num_batches} | {found[0]:.0e} | {found[1]:.0e} |")
    print("", *rows, sep="\n")
