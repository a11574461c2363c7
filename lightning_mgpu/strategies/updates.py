"""Every replica makes its own update, as in the book, unless user code may take part in it.

In its turn a replica finds its own parameters in the optimizers. For its update the user's
optimizer steps again in that turn, with the replica's own state.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_mgpu.strategies.devices_and_attributes import current_device
from lightning_mgpu.strategies.equality import EqualityCheck
from lightning_mgpu.strategies.hooks import TORCH_OPTIMIZERS, has_hooks
from lightning_mgpu.strategies.replicas import Replicas


class Updates:
    """Gives the optimizers to replicas in their turns, and makes the replicas' own updates."""

    def __init__(self, replicas: Replicas, replicas_update: bool) -> None:
        self.replicas, self.replicas_update = replicas, replicas_update
        self.optimizers: Sequence[Optimizer] = ()  # of the training step that runs
        # of the optimizers' groups, when the first replica's turn began
        self._settings: list[dict[str, Any]] = []
        self._states: dict[Optimizer, list[Any]] = {}  # by replica
        self._repeated: set[Optimizer] = set()  # every replica steps it, and keeps its own state
        self.check = EqualityCheck()  # of the replicas' weights after their own updates
        self.is_check_due = False
        self.was_repeated = False  # whether every replica has made the last update itself
        # whether replicas were equal after the optimizer's first step of an epoch
        self._are_equal: dict[Optimizer, bool] = {}

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A step begins, which trains with these optimizers.

        A replica that looks at a state gets a copy of it.
        """
        self.optimizers = optimizers
        self._settings = [dict(group) for each in optimizers for group in each.param_groups]
        for optimizer in optimizers:
            has_state = isinstance(optimizer, Optimizer) and not hasattr(type(optimizer), "state")
            if not has_state:  # Lightning takes others, too
                raise MisconfigurationException(
                    f"{type(optimizer).__name__} is not a torch.optim.Optimizer with a "
                    "state: derive it from that."
                )
            if optimizer not in self._repeated:
                self.offer_state(optimizer)
                if self.replicas_update and self._is_repeatable(optimizer):
                    self._repeated.add(optimizer)
                    states = self._states[optimizer]
                    self._states[optimizer] = [state.load() for state in states]  # as it is now

    def offer_state(self, optimizer: Optimizer) -> None:
        """Let replicas have copies of the optimizer's state as it is now, once they look at it."""
        load = partial(self._copy_of_state, optimizer.state)
        count = len(self.replicas.devices)
        self._states[optimizer] = [CopyOnDemand(partial(load, i)) for i in range(count)]

    @contextmanager
    def use_state_of(self, i: int, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Let optimizers have replica i's parameters and states inside the block.

        Replicas begin with the same settings.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if i == 0:
            self._settings = [dict(group) for group in groups]
            with self._copied_at_first_look(optimizers):
                yield
            return
        before = [dict(group) for group in groups]
        states = [optimizer.state for optimizer in optimizers]
        for group, settings in zip(groups, self._settings):
            group.update(settings)
            group["params"] = [self.replicas.tensor_of(param, i) for param in settings["params"]]
        for optimizer in optimizers:
            optimizer.state = self._states[optimizer][i]
        try:
            yield
        finally:
            for group, settings in zip(groups, before):
                self._compare_settings(group, settings)
                group.clear()
                group.update(settings)
            for optimizer, state in zip(optimizers, states):
                self._states[optimizer][i], optimizer.state = optimizer.state, state

    def _compare_settings(self, group: dict[str, Any], first: dict[str, Any]) -> None:
        """Warn of settings that replicas have changed in different ways."""
        for name, value in group.items():
            if isinstance(value, (int, float)) and value != first.get(name, value):
                self.replicas.notes.warn(
                    f"A step sets {name} of an optimizer's group by what is in its shard: the "
                    "first replica's value stays. Set it in a hook."
                )

    @contextmanager
    def _copied_at_first_look(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Inside the block the first look at a state copies it for the other replicas.

        The step may edit the state next.
        """
        replaced = []
        for optimizer in optimizers:
            state, others = optimizer.state, self._states[optimizer][1:]
            if any(isinstance(each, CopyOnDemand) for each in others):
                optimizer.state = CopyOnDemand(partial(_load_all, state, others))  # type: ignore[assignment]
                replaced.append((optimizer, optimizer.state, state))
        try:
            yield
        finally:
            for optimizer, placeholder, state in replaced:
                if optimizer.state is placeholder:  # the step may have assigned another
                    optimizer.state = state

    def repeat(self, optimizer: Optimizer, push_gradients: Callable[[], None]) -> bool:
        """Let the other replicas make the update that the first one has made, if they can.

        Args:
            optimizer: The user's, which has stepped.
            push_gradients: Called before the others step, to give them the first one's
                gradients if theirs may differ.

        Returns:
            Whether they have made it, and hold the first one's bits. An epoch's first such update
            is compared.

        Raises:
            RuntimeError: If replicas were equal after such updates, and are not any more.
        """
        self.was_repeated = optimizer in self._repeated and self._is_repeatable(optimizer)
        if not self.was_repeated:
            self._repeated.discard(optimizer)  # its states lag behind from now on
            return False
        push_gradients()
        self._settings = [dict(group) for group in optimizer.param_groups]
        for i, device in enumerate(self.replicas.devices[1:], start=1):
            with self.use_state_of(i, [optimizer]), current_device(device):
                type(optimizer).step(optimizer)
        if optimizer not in self._are_equal:
            step = self.replicas.module.global_step
            self._are_equal[optimizer] = not self.check.find(self.replicas.parameter_sets, step)
        elif self.is_check_due:
            self.check_equality()
        self.was_repeated = self._are_equal[optimizer]
        if self.was_repeated:
            self.replicas.mark_equal()
        return self.was_repeated

    def check_equality(self) -> None:
        """Raise an error if replicas that make their own updates have drifted apart."""
        step = self.replicas.module.global_step
        if difference := self.check.find(self.replicas.parameter_sets, step):
            name, i, when = difference
            raise RuntimeError(
                f"{name} of replica {i} ({self.replicas.devices[i]}) is not replica 0's ({when}): "
                "gradients were not reduced to the same bits, or one replica's weights were "
                "edited unseen."
            )

    def copy_again(self) -> None:
        """States may have been edited, or an epoch begins: copy them, and compare again."""
        self.was_repeated = False
        self._repeated.clear()
        self._are_equal.clear()

    def _is_repeatable(self, optimizer: Optimizer) -> bool:
        """Whether replicas can make this update themselves.

        They can with an optimizer of torch's as it is, on devices of one kind, if no user code
        takes part in it.
        """
        module, sets = self.replicas.module, self.replicas.set_of  # without scripted layers'
        step = vars(optimizer).get("step")  # a scheduler puts one there, which calls the class's
        return (
            module.automatic_optimization
            and not self.replicas.unknown_code
            and getattr(module.trainer.precision_plugin, "scaler", None) is None  # it may skip one
            and type(optimizer) in TORCH_OPTIMIZERS
            and not isinstance(optimizer, LBFGS)
            and (step is None or getattr(step, "__wrapped__", None) is type(optimizer).step)
            and self._are_equal.get(optimizer, True)
            and all(
                id(param) in sets and not has_hooks(param)
                for group in optimizer.param_groups
                for param in group["params"]
            )
            and len({device.type for device in self.replicas.devices}) == 1
        )

    def _copy_of_state(self, state: Mapping[Any, Any], i: int) -> defaultdict[Any, Any]:
        """Replica i's copy of an optimizer's state, by its parameters.

        A counter on the CPU stays there.
        """
        home, device = self.replicas.devices[0], self.replicas.devices[i]
        state_by_param: defaultdict[Any, Any] = defaultdict(dict)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device if tensor.device == home else tensor.device, copy=True)

        for param, of_param in list(state.items()) if i else ():
            its_param = self.replicas.tensor_of(param, i)
            state_by_param[its_param] = apply_to_collection(of_param, Tensor, move)
        return state_by_param


@contextmanager
def refuse_other_optimizers(replicas: Replicas) -> Iterator[None]:
    """Refuse an optimizer that steps weights and is not one of `configure_optimizers`.

    Every replica would step the first one's weights.
    """

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        if replicas.is_away and any(id(param) in replicas.set_of for param in params):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps in training_step, but configure_optimizers has "
                "not returned it: let it."
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _load_all(state: Any, others: Sequence[Any]) -> Any:
    for each in others:
        if isinstance(each, CopyOnDemand):
            each.load()
    return state


class CopyOnDemand:
    """A replica's copy of an optimizer's state, made when the replica first looks at it.

    Hardly any step does. It passes every call on to the copy, a `defaultdict` like the state.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = cache(load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.load(), memo)

    def __copy__(self) -> Any:
        return copy.copy(self.load())

    def __reduce__(self) -> Any:
        return self.load().__reduce__()


def _ask_the_copy(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.load(), name)(*args)


for _name in "getitem setitem delitem contains iter len eq or ior repr".split():  # noqa: SIM905
    setattr(CopyOnDemand, f"__{_name}__", _ask_the_copy(f"__{_name}__"))  # found on the class only
MutableMapping.register(CopyOnDemand)
