"""`{"loss": loss, "weight": n}`: the gradient of an update is that of one big batch.

The reference is a loop without a Trainer, which computes the loss of the whole window at once.
"""

import logging
import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import HOME, make_strategy, relative_error
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

NUM_TOKENS, NUM_SAMPLES, LENGTH, BATCH_SIZE = 7, 38, 6, 4  # the last batch has two samples
CLASS_WEIGHTS = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(3)).double()


def sequences(num_samples=NUM_SAMPLES):
    """Tokens, and targets of unequal lengths: none at all in batch 1, and in a shard of batch 3."""
    generator = torch.Generator().manual_seed(1)
    X, y = torch.randint(0, NUM_TOKENS, (2, num_samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH, (num_samples,), generator=generator)
    lengths[4:8] = lengths[14:16] = 0
    y[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return list(zip(X, y))


def collate(samples):
    """Without copying: a window of batches is a batch, too."""
    X, y = zip(*samples)
    return torch.stack(X), torch.stack(y)


def loader():
    return DataLoader(sequences(), BATCH_SIZE, collate_fn=collate)


class Tokens(LightningModule):
    """A loss per token. `class_weights` is torch's mean that divides by the targets' weights."""

    def __init__(self, class_weights=None, is_weighted=True):
        super().__init__()
        seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Embedding(NUM_TOKENS, 5), nn.Linear(5, NUM_TOKENS)).double()
        self.register_buffer("class_weights", class_weights)
        self.is_weighted = is_weighted

    def loss(self, X, y):
        Z = self.net(X).flatten(0, 1)
        # not `cross_entropy`, whose gradient is 0 where its loss is NaN
        losses = F.cross_entropy(Z, y.flatten(), self.class_weights, reduction="none")
        return losses.sum() / self.count(y)

    def count(self, y):
        is_target = y != -100
        if self.class_weights is None:
            return is_target.sum()
        return self.class_weights[y[is_target]].sum()

    def training_step(self, batch, batch_idx):
        X, y = batch
        loss = self.loss(X, y)
        return {"loss": loss, "weight": self.count(y)} if self.is_weighted else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


class Two(Tokens):
    """An optimizer for the embedding, another one for the layer on it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        X, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(X, y), weight=self.count(y).item())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.5) for layer in self.net]


def one_big_batch(make=Tokens, num_batches=1, clip=None, skips=True):
    """Two epochs in plain PyTorch."""
    module, size = make(), BATCH_SIZE * num_batches
    optimizers = module.configure_optimizers()
    for _ in range(2):
        for start in range(0, NUM_SAMPLES, size):
            X, y = collate(sequences()[start : start + size])
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.zero_grad(set_to_none=False)
                if len(y[y != -100]):
                    module.loss(X, y).backward()
                else:
                    for param in module.parameters():
                        param.grad = torch.zeros_like(param) if not skips else None
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
    return module


@pytest.fixture
def fit(trainer_on, engine):
    def fit(make, k, ckpt_path=None, loader=loader, **kwargs):
        module = make()
        options = {"strategy": engine, "max_epochs": 2, "limit_val_batches": 0} | kwargs
        trainer_on(k, **options).fit(module, loader(), ckpt_path=ckpt_path)
        return module

    return fit


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 2, 4])  # of ten: the last window of four has two
@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS], ids=["tokens", "class weights"])
def test_devices_and_batches_are_weighted(fit, k, num_batches, class_weights):
    def make(**kwargs):
        return Tokens(class_weights, **kwargs)

    expected = one_big_batch(make, num_batches, skips=False)
    settings = {"accumulate_grad_batches": num_batches}
    assert relative_error(fit(make, k, **settings), expected) < 1e-10
    if num_batches > 1:  # with one, a whole batch without targets is NaN
        without = fit(lambda: make(is_weighted=False), k, **settings)
        assert not relative_error(without, expected) < 1e-3


def test_replicas_on_one_device(fit, engine):
    strategy = make_strategy(engine, replicas=4)
    module = fit(Tokens, 1, strategy=strategy, accumulate_grad_batches=4)
    assert relative_error(module, one_big_batch(num_batches=4)) < 1e-10


@pytest.mark.parametrize("k", [1, 3])
def test_clipping_sees_the_mean(fit, k):
    module = fit(Tokens, k, accumulate_grad_batches=4, gradient_clip_val=0.1)
    assert relative_error(module, one_big_batch(num_batches=4, clip=0.1)) < 1e-10


@pytest.mark.parametrize("k", [1, 3])
def test_hooks_see_the_mean_so_far(fit, k):
    """After every batch of a window."""
    norms = []

    class Looks(Tokens):
        def on_after_backward(self):
            gradients = [p.grad for p in self.parameters()]
            norms.append([gradient.norm().item() for gradient in gradients if gradient is not None])

    fit(Looks, k, accumulate_grad_batches=3, limit_train_batches=3, max_epochs=1)
    module = Tokens()
    for num, found in enumerate(norms, start=1):
        module.zero_grad()
        module.loss(*collate(sequences()[: num * BATCH_SIZE])).backward()
        assert found == pytest.approx([p.grad.norm().item() for p in module.parameters()], 1e-10)
    assert len(norms) == 3


@pytest.mark.parametrize("k", [1, 3])
def test_with_a_grad_scaler(fit, k):
    scaler = torch.amp.GradScaler(HOME.type, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", HOME.type, scaler)]  # float64 stays as it is
    module = fit(Tokens, k, accumulate_grad_batches=2, plugins=plugins)
    assert relative_error(module, one_big_batch(num_batches=2)) < 1e-10
    assert scaler.get_scale() > 2.0**16


@pytest.mark.parametrize("k", [1, 2, 3])
def test_two_optimizers_by_hand(fit, k):
    assert relative_error(fit(Two, k), one_big_batch(Two)) < 1e-10


@pytest.mark.parametrize("k", [1, 3])
def test_an_update_that_counts_nothing(fit, k, recwarn):
    """Batch 1 has no targets. The loss that callbacks see is 0, not NaN."""
    seen = []

    def look(trainer, module, optimizer):
        seen.append([param.grad for param in module.parameters()])

    losses = []
    callback = LambdaCallback(
        on_before_optimizer_step=look,
        on_train_batch_end=lambda _, __, outputs, *___: losses.append(outputs["loss"].item()),
    )
    module = fit(Tokens, k, callbacks=[callback], max_epochs=1, limit_train_batches=2)
    assert all(gradient is not None and not gradient.any() for gradient in seen[1])
    assert losses[0] > 0 == losses[1]
    assert all(param.isfinite().all() for param in module.parameters())
    [message] = [str(each.message) for each in recwarn if "nothing to count" in str(each.message)]
    assert message.startswith("The update after batch 1 of epoch 0 has nothing to count")


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("step", [2, 3])  # batches: in the middle of a window, and at its end
def test_resumed_the_window_starts_anew(fit, tmp_path, k, step):
    """In the middle of a window, the batches before it are in no checkpoint."""
    windows = [[]]  # of the resumed run: batches

    class Stops(Tokens):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx + 1 == step:
                self.trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    class Resumed(Tokens):
        def on_train_batch_start(self, batch, batch_idx):
            windows[-1] += zip(*(part.cpu() for part in batch))

        def on_before_zero_grad(self, optimizer):
            if windows[-1]:
                windows.append(windows[-1][-BATCH_SIZE:])
                del windows[-2][-BATCH_SIZE:]

    settings = {"accumulate_grad_batches": 3, "max_epochs": 1}
    fit(Stops, k, **settings)
    resumed = fit(Resumed, k, ckpt_path=tmp_path / "stopped.ckpt", **settings)
    content = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    expected = Tokens()
    optimizer = expected.configure_optimizers()
    expected.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer_states"][0])
    windows = [window for window in windows if window]
    assert len(windows[0]) == (1 if step == 2 else 3) * BATCH_SIZE
    for window in windows:
        optimizer.zero_grad()
        expected.loss(*collate(window)).backward()
        optimizer.step()
    assert relative_error(resumed, expected) < 1e-10


class Sparse(Tokens):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net[0].sparse = True


class InAList(Tokens):
    """The layers are not children of the module. The optimizer has them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layers = [self.net]
        del self.net

    def loss(self, X, y):
        object.__setattr__(self, "net", self.layers[0])
        return super().loss(X, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.layers[0].parameters(), 0.5, momentum=0.9)


class CreatesGraph(Tokens):
    def backward(self, loss):
        loss.backward(create_graph=True)


@pytest.mark.parametrize(("make", "k"), [(Sparse, 1), (Sparse, 2), (InAList, 1), (InAList, 2)])
def test_sparse_gradients_and_layers_in_a_list(fit, make, k):
    module = fit(make, k, accumulate_grad_batches=2)
    expected = one_big_batch(num_batches=2)
    found = module.layers[0] if make is InAList else module.net
    assert relative_error(found, expected.net) < 1e-10
    assert relative_error(fit(Sparse, k).net, one_big_batch(skips=False).net) < 1e-10


def test_gradients_with_a_graph(fit):
    module = fit(CreatesGraph, 1, accumulate_grad_batches=2)
    assert relative_error(module, one_big_batch(num_batches=2)) < 1e-10


@pytest.mark.parametrize("k", [1, 3])
def test_by_hand_with_a_grad_scaler(fit, k):
    """It must find gradients, also after a batch that counts nothing."""
    plugins = [MixedPrecision("16-mixed", HOME.type, torch.amp.GradScaler(HOME.type))]
    assert relative_error(fit(Two, k, plugins=plugins), one_big_batch(Two)) < 1e-10


@pytest.mark.parametrize("k", [1, 2])
def test_a_batch_that_the_modules_backward_leaves_out_counts_nothing(fit, k):
    class LeavesOut(Tokens):
        def backward(self, loss):
            if self.trainer.fit_loop.epoch_loop.batch_idx != 2:
                loss.backward()

    settings = {"accumulate_grad_batches": 4, "max_epochs": 1, "limit_train_batches": 4}
    module, expected = fit(LeavesOut, k, **settings), Tokens()
    samples = sequences()
    expected.loss(*collate(samples[:8] + samples[12:16])).backward()
    expected.configure_optimizers().step()
    assert relative_error(module, expected) < 1e-10


def test_odd_losses_with_nothing_to_count(fit):
    class Odd(Tokens):
        def training_step(self, batch, batch_idx):
            if batch_idx:
                return super().training_step(batch, batch_idx)
            return {"loss": torch.tensor(0, device=self.device), "weight": 0}

    for k in (1, 2):
        assert all(param.isfinite().all() for param in fit(Odd, k, max_epochs=1).parameters())


WRONG = {
    "-1": (lambda module, X: -1, "weight of a loss is -1.0: it must be finite, and not negative"),
    "nan": (lambda module, X: math.nan, "weight of a loss is nan"),
    "several": (lambda module, X: X[0] * 1.0, "weight of a loss is (6,) values: return one number"),
    "huge": (lambda module, X: 10**400, "weight of a loss is 1000"),
    "None": (lambda module, X: None, "weight of a loss is None: return one number"),
}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("base", [Tokens, Two])
def test_a_wrong_weight(fit, k, name, base):
    weight, message = WRONG[name]

    class Wrong(Tokens):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(*batch), "weight": weight(self, batch[0])}

    class WrongByHand(Two):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(*batch), weight=weight(self, batch[0]))

    with pytest.raises(MisconfigurationException) as error:
        fit(Wrong if base is Tokens else WrongByHand, k)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("base", [Tokens, Two])
def test_a_weight_of_some_replicas(fit, base):
    class Some(Tokens):
        def training_step(self, batch, batch_idx):
            loss = {"loss": self.loss(*batch), "weight": 1}
            return loss if len(batch[0]) % 2 else loss["loss"]

    class SomeByHand(Two):
        def training_step(self, batch, batch_idx):
            weight = {"weight": 1} if len(batch[0]) % 2 else {}
            self.manual_backward(self.loss(*batch), **weight)

    with pytest.raises(MisconfigurationException, match=r"Replicas \[1, 2\] give their losses a"):
        fit(Some if base is Tokens else SomeByHand, 3)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("first", "says"), [(True, "no"), (False, "a")])
def test_a_weight_in_some_batches_of_a_window(fit, k, first, says):
    class Some(Tokens):
        def training_step(self, batch, batch_idx):
            output = {"loss": self.loss(*batch), "weight": 1}
            return output if (batch_idx == 0) == first else output["loss"]

    with pytest.raises(MisconfigurationException, match=f"^Batch 1 gives its loss {says} weight"):
        fit(Some, k, accumulate_grad_batches=2)


@pytest.mark.parametrize("k", [1, 2])
def test_a_skipped_batch_counts_nothing(fit, k):
    """It may be the first of a window."""

    class Skips(Tokens):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx in (0, 3) else None

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = {"accumulate_grad_batches": 2, "max_epochs": 1, "limit_train_batches": 4}
    module, expected = fit(Skips, k, **settings), Tokens()
    optimizer = expected.configure_optimizers()
    for batch in (0, 3):
        optimizer.zero_grad()
        samples = sequences()[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
        expected.loss(*collate(samples)).backward()
        optimizer.step()
    assert relative_error(module, expected) < 1e-10


@pytest.mark.parametrize("k", [1, 3])
def test_the_mean_per_token_of_an_epoch_is_logged(fit, k):
    """A shard without targets logs a NaN, of a mean over nothing."""

    class Logs(Tokens):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            num_targets = int(output["weight"])
            self.log("loss", output["loss"], on_epoch=True, batch_size=num_targets)
            return output

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    samples = sequences()[8:]
    module = fit(Logs, k, loader=lambda: DataLoader(samples, BATCH_SIZE, collate_fn=collate))
    expected = module.cpu().loss(*collate(samples))
    assert module.trainer.callback_metrics["loss_epoch"].item() == pytest.approx(expected.item())


def test_the_steps_own_tensor_gets_no_hook(fit):
    class Keeps(Tokens):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.kept = output["loss"]
            return output

    assert not fit(Keeps, 1, max_epochs=1).kept._backward_hooks


def test_what_callbacks_get(fit):
    """The mean of the batch, over what its shards have counted, and how much that is."""
    seen = []
    callback = LambdaCallback(on_train_batch_end=lambda _, __, outputs, *___: seen.append(outputs))
    settings = {"max_epochs": 1, "limit_train_batches": 1, "callbacks": [callback]}
    module = Tokens()
    X, y = collate(sequences()[:BATCH_SIZE])
    fit(Tokens, 3, **settings)
    assert seen[0]["weight"] == module.count(y)
    torch.testing.assert_close(seen[0]["loss"].cpu(), module.loss(X, y).detach())
