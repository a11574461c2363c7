"""`manual_allreduce` with an exchange of one's own in the place of the allreduce."""

from collections import ChainMap
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.exchanges.check import check_exchange, path_of
from lightning_mgpu.exchanges.local_sgd import exchange_and_step, nesterov
from lightning_mgpu.exchanges.runner import (
    HEAD,
    Looks,
    drive,
    exact,
    look_at_all,
    run_exchanges,
    to_bytes,
)
from lightning_mgpu.processes.meeting import start_sending
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.buffers import read_buffers
from lightning_mgpu.strategies.window import Gradients

KEY, LAST = "exchange", "last.ckpt"  # in a checkpoint; the only file with states, which are large


class Early(NamedTuple):
    """A first round on its way, while what all processes see is not known."""

    run: Any | None  # the exchanges, if this process has started them
    states: dict[int, Any]  # as they were before it
    num_bytes: int  # of a row, without buffers
    receive: Callable[[], np.ndarray]


class ExchangeStrategy(ManualAllreduceStrategy):
    """Replicas that are kept equal by an exchange: a generator that sends what it yields.

    Args:
        exchange: One replica's side (see `lightning_mgpu.exchanges`), or its dotted path.
        options: Arguments of the exchange, by name.
        every: H. Each replica updates itself by its own shard's gradient, and after H updates the
            exchange gets the differences of the weights. Left out: it gets all gradients.
        outer: For `every`: a function of the mean difference of the weights and of a state, which
            returns what is subtracted from the last common weights; or its dotted path.
        outer_lr, outer_momentum: Of the step of SGD with Nesterov momentum that is the default.
        replicas, ...: As for `ManualAllreduceStrategy`.
    """

    why_weights_differ = (
        "an exchange whose result depends on the replica or draws unseeded numbers, "
        f"{ManualAllreduceStrategy.why_weights_differ}"
    )

    def __init__(
        self,
        exchange: Callable[..., Any] = exact,
        options: dict[str, Any] | None = None,
        every: int | None = None,
        outer: Callable[..., Any] | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.allreduce is not textbook_allreduce or (every is not None and every < 1):
            raise ValueError(f"{every=}: it is 1 or more; and an exchange takes no `allreduce`")
        if (outer or not every) and (outer_lr, outer_momentum) != (1, 0):
            raise ValueError("`outer_lr` and `outer_momentum` need `every`, and no `outer`")
        if outer and not every:
            raise ValueError("`outer` needs `every`")
        self.exchange, self.options, self.every = exchange, options or {}, every
        self.outer, self.outer_lr, self.outer_momentum = outer, outer_lr, outer_momentum
        self._num_updates = 0  # since the last exchange of weights

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.module.trainer.state.fn != TrainerFn.FITTING:
            return
        self._function: Any = partial(self.exchange, **self.options)
        if self.every:
            default = partial(nesterov, lr=self.outer_lr, momentum=self.outer_momentum)
            outer = self.outer or default
            self._function = partial(exchange_and_step, self._function, outer)
        with self.precision_plugin.module_init_context():
            dtype = torch.get_default_dtype()
        # before a callback makes a run directory
        has_state = check_exchange(self._function, self.exchange, self.root_device, dtype)
        self._is_stateful = bool(self.every) or has_state

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        has_lbfgs = any(isinstance(each, LBFGS) for each in self.optimizers)
        is_wrong = has_scaler or has_lbfgs or not self.module.automatic_optimization
        averages, callbacks = (
            (WeightAveraging, StochasticWeightAveraging),
            vars(trainer)["callbacks"],
        )
        has_average = any(isinstance(each, averages) for each in callbacks)
        is_apart = self.num_local > 1 or self._layer_sync is not None or has_average
        if (self.every and is_apart) or (self._is_stateful and is_wrong):
            raise MisconfigurationException(
                "`every`, and an exchange that keeps a state, need automatic optimization, no "
                "LBFGS, and no GradScaler: bf16-mixed in place of 16-mixed. `every` also needs one "
                "replica per process, no sync_batchnorm, and no callback that averages weights."
            )
        self._states: dict[int, Any] = {replica: {} for replica in self.local_replicas}
        self._plans: dict[Any, Any] = {}
        self._last_looks: Looks = ()  # of the step before
        self._expected: Looks = ()  # the same, if the step before that one had them, too
        self._num_buffer_bytes = 0  # in the last first round
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum
        self._num_updates = self._facts = 0
        self._weights: Gradients = {}  # the last common ones

    @torch.no_grad()
    def exchange_gradients(self, replicas: list[Gradients], shares: list[float]) -> None:
        """Leave what the exchange returns in the `grad` of every parameter."""
        if self.every:  # the mean over this replica's own shard
            facts = [each.facts for each in self.passes()]
            self._facts = crc32(repr(facts).encode(), self._facts)
            sums = {p: torch.empty_like(p).copy_(g) for p, g in replicas[0].items()}
        else:
            looks = look_at_all(self._named(), replicas)
            early = self._start_early(looks, replicas)
            layout = crc32(repr((*self._find_layout().values(),)).encode())
            row = self.compare_facts("gradients", np.array(looks, np.uint8), parameters=layout)
            sums = self._run(replicas, tuple(row.max(axis=0, initial=0).tolist()), early)
        self.set_sums(sums)
        self.num_bytes[1] += sum(p.nbytes for p in sums)

    def _named(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def _start_early(self, looks: Looks, replicas: list[Gradients]) -> Early | None:
        """Send a first round beside the meeting, as if this step looked like the two before it.

        All processes send a row of the same length, or none does. One that sees more than is
        expected sends zeros, and then no process keeps the round.
        """
        expected, plan = self._expected, self._plans.get(self._expected)
        # between GPUs, a process that fails meanwhile would leave the others in a kernel
        is_slow = not self.is_alone and self.cells is None and self.root_device.type == "cpu"
        if not plan or not is_slow:
            return None
        num_bytes = HEAD + plan[0].num_bytes
        num_buffer_bytes = len(self._buffers[0]) if self._buffers else 0
        is_alike = num_buffer_bytes == self._num_buffer_bytes and len(looks) == len(expected)
        states, run = deepcopy(self._states), None
        if is_alike and all(here <= most for here, most in zip(looks, expected)):
            run = self._new_run(replicas, expected)
            rows = self._add_buffers(next(run)[0])
        else:
            length = num_bytes + self._num_buffer_bytes
            rows = torch.zeros(self.num_local, length, dtype=torch.uint8)
        # by another group than a meeting's: a process may be at another place
        return Early(run, states, num_bytes, start_sending(self, rows.flatten().numpy(), None))

    def _new_run(self, replicas: list[Gradients], looks: Looks) -> Any:
        named, k = self._named(), self.num_replicas
        return run_exchanges(self._function, named, replicas, self._states, looks, k, self._plans)

    def _run(
        self, replicas: list[Gradients], looks: Looks, early: Early | None = None
    ) -> Gradients:
        """The exchange of all parameters. The replicas' buffers travel in its first round."""
        run = rows = None
        if early is not None:
            received = torch.from_numpy(early.receive()).view(self.num_replicas, -1)
            if early.run and looks == self._expected:  # then every process has started one
                run, rows = early.run, self._take_buffers(received, early.num_bytes)
            else:
                self._states = early.states
                self.num_bytes[0] += early.num_bytes
        self._expected = looks if looks == self._last_looks else ()
        self._last_looks = looks
        self._num_buffer_bytes = len(self._buffers[0]) if self._buffers else self._num_buffer_bytes
        meet = partial(self.gather_rows, purpose="an exchange")
        results, n = drive(run or self._new_run(replicas, looks), meet, self._send, rows)
        if self._buffers:  # there was no round
            self.share_buffers()
        self.num_bytes[0] += n
        return results

    def _send(self, rows: Tensor) -> Tensor:
        return self._take_buffers(self.gather_rows(self._add_buffers(rows)), rows.shape[1])

    def _add_buffers(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.stack(self._buffers)], dim=1) if self._buffers else rows

    def _take_buffers(self, sent: Tensor, num_bytes: int) -> Tensor:
        if sent.shape[1] > num_bytes:
            super().share_buffers(sent[:, num_bytes:].contiguous())
        return sent[:, :num_bytes]

    def find_shares(self) -> list[float]:
        return [1.0] if self.every else super().find_shares()

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        return weights if self.every else super().gather_weights(weights)

    def _find_trained(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _find_still(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if not p.requires_grad]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.every and not self._weights:  # before a closure moves them, as SAM's do
            self._weights = {p: p.detach().clone() for p in self._find_trained()}
            self._still = {p: checksum(p) for p in self._find_still()}
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._num_updates += 1
        if self._num_updates == self.every:
            self.exchange_weights()
        if (trainer := self.module.trainer).is_last_batch:
            values = dict(zip(("exchange_mb", "exact_mb"), (self.num_bytes / 1e6).tolist()))
            for logger in trainer.loggers:
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, trainer.global_step)
        return output

    def on_train_end(self) -> None:
        self.exchange_weights()
        super().on_train_end()
        if self.is_global_zero:
            sent, by_exact = self.num_bytes / 1e6
            how = path_of(self.exchange).rpartition(".")[2]
            print(f"exchange: {sent:.2f} MB per replica by {how}, {by_exact:.2f} by the exact sum")

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """With `every`: an outer step, if there was an update since the last one."""
        if not self.every or not self._num_updates:
            return
        self._num_updates = 0
        differences = {p: (X - p) / self.num_replicas for p, X in self._weights.items()}
        looks, moved = self._compare_since_last(differences)
        self._buffers = [each for each in [read_buffers(self.module)] if len(each)]
        for p, step in self._run([differences], looks).items():
            p.copy_(self._weights[p].sub_(step))
        for p in (p for p, has_moved in zip(self._still, moved) if has_moved):
            rows = self.gather_rows(to_bytes(p)[None])
            p.copy_(rows.view(p.dtype).mean(0).view(p.shape))
        self._weights = {}

    def _compare_since_last(self, differences: Gradients) -> tuple[Looks, np.ndarray]:
        """The meeting of an exchange of weights, about what has happened since the last one.

        Returns the looks, and which parameters without a gradient have moved.
        """
        trained = self._find_trained()
        if {*trained} != {*self._weights} or {*self._find_still()} != {*self._still}:
            raise RuntimeError("Between two exchanges of weights, `requires_grad` must not change.")
        lrs = [group["lr"] for each in self.optimizers for group in each.param_groups]
        facts = np.array([self._facts, checksum(lrs), len(trained)]).view(np.uint8)
        looks = np.array(look_at_all(self._named(), [differences]), np.uint8)
        moved = np.array([checksum(p) != value for p, value in self._still.items()], np.uint8)
        rows = self.gather(np.concatenate([facts, looks, moved]), "weights to exchange")
        numbers = np.ascontiguousarray(rows[:, : len(facts)]).view(np.int64)
        names = "batches", "learning rates", "parameters that require a gradient"
        for process, i in np.argwhere(numbers != numbers[0]).tolist():
            raise RuntimeError(
                f"Since the last exchange of weights, process {process} had other {names[i]} than "
                "process 0: seed all alike, do not split a dataset by rank, and let schedulers "
                "act on what is logged with sync_dist=True."
            )
        self._facts = 0
        all_looks, all_moved = np.split(rows[:, len(facts) :], [len(looks)], axis=1)
        return tuple(all_looks.max(axis=0).tolist()), all_moved.max(axis=0, initial=0)

    def share_buffers(self, rows: Tensor | None = None) -> None:
        """With `every` they are shared when weights are, and not in every step."""
        if not (self.every and self._num_updates):
            super().share_buffers(rows)

    def compare_weights(self) -> None:
        if not (self.every and self._num_updates):  # else they differ
            super().compare_weights()

    def on_validation_start(self) -> None:
        self.exchange_weights()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of a checkpoint: all processes ask for them, before anything else."""
        self.exchange_weights()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if Path(filepath).name == LAST:
            # with `every`, each process has its own optimizer states
            optimizers = [each.state_dict() for each in self.optimizers if self.every]
            own = {replica: [kept, optimizers] for replica, kept in self._states.items()}
            own = move_data_to_device(own, "cpu")
            parts = self._gather_objects(own)
            checkpoint[KEY] = {
                "settings": self._settings(),
                "replicas": dict(ChainMap(*parts)),
                "num_bytes": self.num_bytes.tolist(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _gather_objects(self, own: Any) -> list[Any]:
        """Those of all processes. While it waits, it sees signals, unlike torch's collectives."""
        torch.save(own, content := BytesIO())
        sizes = self.gather(np.array([content.tell()]), "sizes of states").ravel()
        row = np.zeros(sizes.max(), np.uint8)
        row[: content.tell()] = np.frombuffer(content.getbuffer(), np.uint8)
        rows = self.gather(row, "states")
        files = (BytesIO(each[:size]) for each, size in zip(rows, sizes))
        return [torch.load(file, weights_only=True) for file in files]

    def _settings(self) -> dict[str, Any]:
        """A resumed run must not change these. By the name of their flags."""
        names = ("options", "every", "outer_lr", "outer_momentum")
        settings = {f"strategy.{name}": getattr(self, name) for name in names}
        k = {"devices" if self.every else "strategy.replicas": self.num_replicas}
        outer = {"strategy.outer": path_of(self.outer) if self.outer else None}
        return {"strategy.exchange": path_of(self.exchange), **outer, **settings, **k}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Lightning calls this after `setup`, when a run is resumed."""
        if KEY in checkpoint:
            optimizers = self._restore(checkpoint[KEY])
            states = optimizers or checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": states}
        elif self._is_stateful:
            raise MisconfigurationException(
                "This checkpoint has no exchange's state: it is not a run's last.ckpt, or its run "
                "had another strategy."
            )
        super().load_optimizer_state_dict(checkpoint)

    def _restore(self, saved: dict[str, Any]) -> list[Any]:
        for flag, value in self._settings().items():
            if value != (before := saved["settings"].get(flag)):
                raise MisconfigurationException(
                    f"The run has --trainer.{flag}={before}, which must stay: here it is {value}."
                )
        self.num_bytes = np.array(saved["num_bytes"])
        for replica, kept in self._states.items():
            states, optimizers = saved["replicas"][replica]
            kept |= move_data_to_device(states, self.root_device)
        return optimizers
