"""The language model of docs/adding.md, against plain PyTorch with one big batch."""

from typing import Any

import pytest
from lightning.pytorch import seed_everything

from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.test_adding import FILES

WINDOW, NUM_BATCHES = 128, 4
TITLES = ("devices", "batches per update", "with the weight", "without it")
ROWS = ["| " + " | ".join(TITLES) + " |", "| --: " * 4 + "|"]  # as on the page


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "my_language_model"}
    exec(compile(FILES["my_language_model.py"], "docs/adding.md", "exec"), found)
    return found


def test_one_big_batch(page: dict[str, Any], make_trainer: Any) -> None:
    """Two epochs on k replicas, accumulated or not, are two in plain PyTorch, by the weight."""
    seed_everything(0, verbose=False)
    plain = page["LanguageModel"]().double()
    plain.log = lambda *args, **kwargs: None
    optimizer, loader = plain.configure_optimizers(), page["Lines"](WINDOW).train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            plain.training_step(batch, 0)["loss"].backward()
            optimizer.step()

    class Without(page["LanguageModel"]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    def difference(make: Any, replicas: int, num_batches: int) -> float:
        """The largest relative difference of a parameter."""
        seed_everything(0, verbose=False)
        strategy = ManualAllreduceStrategy(replicas=replicas)
        trainer = make_trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=num_batches)
        trainer.fit(module := make().double(), datamodule=page["Lines"](WINDOW // num_batches))
        assert trainer.callback_metrics["loss_per_token"] < 2, "it learns: 2.4 is chance"
        pairs = zip(module.cpu().parameters(), plain.parameters())
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    for k, num_batches in [(1, 1), (1, NUM_BATCHES), (2, 1), (2, NUM_BATCHES), (3, NUM_BATCHES)]:
        by_weight = difference(page["LanguageModel"], k, num_batches)
        without = difference(Without, k, num_batches)
        assert by_weight < 1e-10 and (without > 1e-3 or k == num_batches == 1)
        ROWS.append(f"| {k} | {num_batches} | {by_weight:.0e} | {without:.0e} |")
    print("", *ROWS, sep="\n")
