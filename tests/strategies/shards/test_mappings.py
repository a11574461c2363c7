"""Mappings of a kind of their own: cut and put together again with all they hold."""

from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.strategies.batch.gather import gather
from lightning_mgpu.strategies.batch.shards import find_batch_size, split_batch

CPU = torch.device("cpu")


class Frozen(Mapping):
    """A mapping that can be copied, but not changed."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __copy__(self) -> "Frozen":
        return Frozen(self._items)


def test_a_mapping_that_cannot_be_changed(equal: Any) -> None:
    batch = Frozen({"X": torch.arange(4), "name": "n"})
    shards = split_batch(batch, [3, 1])
    assert [type(shard) for shard in shards] == [Frozen, Frozen]
    assert equal(
        [dict(shard) for shard in shards], [{"X": torch.arange(3), "name": "n"}, {"X": torch.tensor([3]), "name": "n"}]
    )
    assert equal(dict(gather(shards, [3, 1], CPU)), dict(batch))


class Encoded(UserDict):
    """As transformers' `BatchEncoding`: the words of every sample beside the tensors, and keys as attributes."""

    def __init__(self, items: dict[str, Any], words: Any = None) -> None:
        super().__init__(items)
        self.words = words

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def test_a_mapping_with_lists_beside_its_items(equal: Any) -> None:
    batch = Encoded({"ids": torch.arange(3)}, words=["a", "b", "c"])
    first, second = split_batch(batch, [2, 1])
    assert equal([first["ids"], second["ids"]], [torch.arange(2), torch.tensor([2])])
    assert (first.words, second.words, batch.words) == (["a", "b"], ["c"], ["a", "b", "c"])


class Rows(Mapping):
    """As a TensorDict: a mapping that is indexed, iterated and concatenated like a tensor."""

    def __init__(self, items: dict[str, Tensor]) -> None:
        self.items_of, self.batch_size = items, next(iter(items.values())).shape[:1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.items_of[index]
        return Rows({key: value[index] for key, value in self.items_of.items()})

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))

    def __len__(self) -> int:
        return self.batch_size[0]

    def keys(self) -> Any:
        return self.items_of.keys()

    def values(self) -> Any:
        return self.items_of.values()

    def to(self, device: Any, **kwargs: Any) -> "Rows":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.cat
        return Rows({key: torch.cat([rows[key] for rows in args[0]]) for key in args[0][0].keys()})  # noqa: SIM118

    batch_size: torch.Size = torch.Size([])


def test_a_mapping_that_is_a_tensor(equal: Any) -> None:
    batch = Rows({"X": torch.arange(5), "y": torch.arange(5.0)})
    assert find_batch_size(batch) == find_batch_size((batch, torch.rand(5))) == 5
    shards = split_batch(batch, [3, 2])
    assert [shard.batch_size for shard in shards] == [torch.Size([3]), torch.Size([2])]
    whole = gather([{"all": shard} for shard in shards], [3, 2], CPU)["all"]
    assert equal(dict(whole.items_of), dict(batch.items_of))
