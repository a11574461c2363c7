"""A module and its copies on other devices, which are kept like the original.

A replica has parameters and buffers of its own. What the original's hooks and callbacks set between steps (flags,
numbers, lists to append to, `requires_grad`) is given to it before every step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_mgpu.strategies.layers.embeddings import KINDS
from lightning_mgpu.strategies.replicas.attributes import Attributes
from lightning_mgpu.strategies.replicas.get_params import get_params
from lightning_mgpu.strategies.replicas.twins import Twins
from lightning_mgpu.strategies.replicas.values import CONTAINERS, copy_to, tensors_in
from lightning_mgpu.strategies.replicas.versions import (
    NEVER,
    Version,
    is_same_version,
    is_uncounted,
    versioned,
    versions_in,
)


class Replicas:
    """The original module and its copies: `modules[i]` lives on `devices[i]`, and `modules[0]` is the original.

    Raises:
        ValueError: If a lazy layer has not seen its first batch yet: every replica would draw weights of its own.
    """

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        if len(self.devices) > 1 and any(is_lazy(parameter) for parameter in module.parameters()):
            raise ValueError(
                "a lazy layer has no weights to copy to the replicas: call the model once, in `setup` say."
            )
        self.modules = [module, *(get_params(module, device) for device in self.devices[1:])]
        # The k copies of each parameter, owner of buffers, BatchNorm layer and embedding, the original's first
        self.parameters: list[tuple[nn.Parameter, ...]] = list(zip(*(list(m.parameters()) for m in self.modules)))
        layers = list(zip(*(m.modules() for m in self.modules)))
        self.batch_norms = [copies for copies in layers if isinstance(copies[0], _BatchNorm)]
        self.instance_norms = [copies for copies in layers if isinstance(copies[0], _InstanceNorm)]
        self.embeddings = [copies for copies in layers if isinstance(copies[0], KINDS)]
        own = {id(part) for metric in module.modules() if isinstance(metric, Metric) for part in metric.modules()}
        self._owners = [
            (owners, isinstance(owners[0], _BatchNorm))
            for owners in layers
            if id(owners[0]) not in own and (owners[0]._buffers or _is_users(owners[0]))
        ]
        self._parts = [m for m in module.modules() if not isinstance(m, (Metric, MetricCollection, MetricTracker))]
        self._are_users = [_has_users_class(part) for part in self._parts]
        self._structure = list(map(_structure, self._parts, self._are_users))
        inside = [[*m.modules(), *m.parameters()] for m in self.modules]
        self.attributes = [
            Attributes(
                list(_stateful_pairs(module, self.modules[i])),
                Twins(dict(zip(map(id, inside[0]), inside[i])), self.devices[i], index=i, home=self.devices[0]),
            )
            for i in range(1, len(self.modules))
        ]
        self._versions: tuple[int, ...] | None = None
        # The original's buffers and other tensors after a step, by the owner's id
        self._seen: dict[int, dict[str, Version]] = {id(owners[0]): {} for owners, _ in self._owners}
        self._seen |= {id(layers[0]): {} for layers in self.batch_norms}
        self._num_samples = [0] * len(self.devices)  # each has trained on since BatchNorm's statistics were combined

    def broadcast(self, norms: bool = False) -> None:
        """Make every replica's parameters and buffers equal to the original's.

        With `norms` BatchNorm's statistics too, which otherwise are the replica's own.
        """
        self.broadcast_parameters()
        with torch.no_grad():
            for owners, is_norm in self._owners:
                for name in owners[0]._buffers.keys() if norms or not is_norm else ():
                    self._copy_buffer(owners, name)

    def broadcast_parameters(self) -> None:
        with torch.no_grad():
            for original, *copies in self.parameters:
                for tensor in copies:
                    # also between a forward and a backward pass; what comes to the CPU is waited for
                    tensor.data.copy_(original, non_blocking=not tensor.is_cpu)
        self.mark_equal()

    def mark_equal(self) -> None:
        """Remember that the replicas are equal now, to tell later whether somebody has edited the original."""
        self._versions = tuple(parameters[0]._version for parameters in self.parameters)

    def is_edited(self) -> bool:
        """Whether the original's parameters were changed in place since `mark_equal`."""
        return self._versions != tuple(parameters[0]._version for parameters in self.parameters)

    def has_new_structure(self) -> bool:
        """Whether layers or parameters of the original were added, removed, replaced or cut since it was copied."""
        return any(now != known for now, known in zip(map(_structure, self._parts, self._are_users), self._structure))

    def have_objects_of_originals(self) -> bool:
        """Whether hooks have made objects since the replicas, which share them, that use the original's weights.

        An average of the weights made in `configure_optimizers`, say.
        """
        return any(attributes.share_layers() for attributes in self.attributes)

    def share_iterators(self) -> bool:
        """Whether replicas take from the same generator or iterator, which only one may do at a time."""
        return any(attributes.shares_iterators for attributes in self.attributes)

    def with_copies(self) -> set[int]:
        """The `id`s of what is not registered with the module, but on it all the same, and so on the replicas."""
        twins = (attributes.twins.of for attributes in self.attributes)
        return set(map(id, self.unregistered())).union(*twins)

    def unregistered(self) -> list[Tensor]:
        """Tensors that are no parameters, on the module and in lists, dicts and objects on it."""
        known = {id(original) for original, *_ in self.parameters}
        places = [value for (original, *_), _ in self._owners for value in vars(original).values()]
        return [tensor for tensor in tensors_in(places) if id(tensor) not in known]

    def agree(self) -> bool:
        """Whether all replicas hold the same parameters, bit for bit."""
        return all(torch.equal(first, other.to(first.device)) for first, *rest in self.parameters for other in rest)

    def combine_batch_norms(self, are_synchronized: bool) -> None:
        """Average BatchNorm's running statistics over the replicas, weighted by the samples they have trained on since.

        Where somebody else has changed the original's since the last step (averaged weights, say), those count.
        """
        shares: Sequence[int] = [1, *[0] * (len(self.devices) - 1)] if are_synchronized else self._num_samples
        with torch.no_grad():
            for layers in self.batch_norms:
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    stats = [layer._buffers[name] for layer in layers]
                    if stats[0] is None or not any(self._num_samples) or self._is_set(layers[0], name):
                        continue
                    if name != "num_batches_tracked":
                        parts = [stat.to(stats[0].device) * share for stat, share in zip(stats, shares)]  # type: ignore[union-attr]
                        stats[0].copy_(sum(parts) / sum(shares))
                    self._copy_buffer(layers, name)
                    self._seen[id(layers[0])][name] = versioned(stats[0])
        self._num_samples = [0] * len(self.devices)

    def mark_step(
        self, sizes: dict[int, int] | None = None, is_training: bool = False, are_watched: bool = False
    ) -> None:
        """Remember the original's buffers and other tensors at the end of a step, to tell what is set between two.

        Args:
            sizes: The samples of every replica that had some in the step; it was none if left out. The others get what
                the original has made of its shard.
            is_training: Whether it was a step of training.
            are_watched: Whether hooks may edit tensors before the next step that count no changes.
        """
        if sizes and is_training:
            for i, size in sizes.items():
                self._num_samples[i] += size
            self._combine_instance_norms(sizes)
        idle = [i for i in range(len(self.devices)) if sizes and i not in sizes]
        for owners, is_norm in self._owners:
            seen, now = self._seen[id(owners[0])], versions_in(owners[0], are_watched)
            for name, (tensor, _) in now.items() if idle else ():
                is_same = not is_uncounted(tensor) and is_same_version(now[name], seen.get(name, NEVER))
                if name not in owners[0]._buffers and not is_same:
                    self._give_tensor(owners, name, idle)
            if sizes and not (is_training and is_norm):  # its buffers are given to the replicas
                now |= {name: seen.get(name, NEVER) for name in owners[0]._buffers.keys()}  # noqa: SIM118
            self._seen[id(owners[0])] = now

    @torch.no_grad()
    def _combine_instance_norms(self, sizes: dict[int, int]) -> None:
        """Make the running statistics one device's: means over samples, which a replica has those of its shard of."""
        for layers in self.instance_norms:
            for name in ("running_mean", "running_var"):
                stats = [layer._buffers[name] for layer in layers]
                if sizes and layers[0].training and stats[0] is not None:
                    parts = [stats[i].to(stats[0].device) * size for i, size in sizes.items()]  # type: ignore[union-attr]
                    stats[0].copy_(sum(parts) / sum(sizes.values()))

    def give_tensors(self, uncounted: bool = False) -> None:
        """Give the replicas the buffers and other tensors that were set on the original since the last step.

        With `uncounted` also those that count no changes, as they may have some.
        """
        with torch.no_grad():
            for owners, _ in self._owners:
                seen, now = self._seen[id(owners[0])], versions_in(owners[0])
                for name, version in now.items():
                    if is_same_version(version, seen.get(name, NEVER)) and not (uncounted and is_uncounted(version[0])):
                        continue
                    if name in owners[0]._buffers:
                        self._copy_buffer(owners, name)
                        continue
                    self._give_tensor(owners, name, range(1, len(owners)))
                self._seen[id(owners[0])] = now

    def _give_tensor(self, owners: Sequence[nn.Module], name: str, replicas: Iterable[int]) -> None:
        tensor = vars(owners[0])[name]
        for i in replicas:
            vars(owners[i])[name] = copy_to(tensor, self.attributes[i - 1].twins.elsewhere.place(tensor))

    def _is_set(self, owner: nn.Module, name: str) -> bool:
        return not is_same_version(versioned(owner._buffers[name]), self._seen[id(owner)].get(name, NEVER))

    def _copy_buffer(self, owners: Sequence[nn.Module], name: str) -> None:
        original = owners[0]._buffers[name]  # looked up, as `self.steps = self.steps + 1` makes a new one
        for owner, device in zip(owners[1:], self.devices[1:]):
            copied = owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401
            if original is None:
                owner._buffers[name] = None
            elif copied is None or copied.shape != original.shape or copied.is_inference() or 0 in copied.stride():
                owner._buffers[name] = original.detach().to(device, copy=True)
            else:
                copied.copy_(original, non_blocking=not copied.is_cpu)

    def refresh(self) -> bool:
        """Give the replicas what hooks may have set on the original; return whether any module changed its mode."""
        changed_mode = False
        for attributes in self.attributes:
            changed_mode |= any(copied.training != layer.training for layer, copied, _ in attributes.pairs)
            attributes.give()
        for first, *copies in self.parameters:
            for parameter, attributes in zip(copies, self.attributes):
                if parameter.requires_grad != first.requires_grad:
                    parameter.requires_grad_(first.requires_grad)
                for name, value in vars(first).items():
                    vars(parameter)[name] = (
                        attributes.twins.elsewhere.moved(value) if isinstance(value, Tensor) else value
                    )
        return changed_mode

    def collect(self, active: Sequence[int]) -> None:
        """Add to the original's lists and dicts what the active replicas added to theirs during a step, in order."""
        inserted: dict[int, int] = {}
        for i, attributes in enumerate(self.attributes, start=1):
            attributes.collect(self.devices[0], inserted, is_active=i in active)


def _stateful_pairs(module: nn.Module, replica: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, bool]]:
    """Pairs of modules outside of metrics; the last tells whether the class is not one of torch's own."""
    if isinstance(module, Metric):
        return
    yield module, replica, _is_users(module)
    for child, copied in zip(module.children(), replica.children()):
        yield from _stateful_pairs(child, copied)


def _is_users(module: nn.Module) -> bool:
    """Whether a layer is of a user's class, or has attributes of a user's: torch's own keep no lists in public."""
    kept = (value for name, value in vars(module).items() if not name.startswith("_"))
    has_users = "forward" in vars(module) or any(isinstance(value, (Tensor, *CONTAINERS)) for value in kept)
    return has_users or _has_users_class(module)


def _has_users_class(module: nn.Module) -> bool:
    places = (each.__module__ for each in type(module).__mro__)
    place = next(place for place in places if place != "torch.nn.utils.parametrize")  # whose classes are made of others
    return not place.startswith(("torch.", "torchvision."))


def _structure(module: nn.Module, is_users: bool) -> list[Any]:
    """Names, identities and shapes of what is directly inside a module; buffers of users' own are looked up anyway."""
    parameters = [(name, id(part), getattr(part, "shape", None)) for name, part in module._parameters.items()]
    layers = [(name, id(part)) for name, part in module._modules.items()]
    return [*(() if is_users else module._buffers.keys()), *parameters, *layers]
