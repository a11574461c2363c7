"""Allreduce algorithms: `allreduce(tensors)` overwrites k tensors, one per device, with their sum.

An algorithm is a plain function of a list of tensors, so it can be read, tested and replaced
separately; `check_allreduce` verifies your own. Costs for k > 1 devices and tensors of n bytes
(the bytes are received, and sent, by the busiest device):

| file               | messages | supersteps      | bytes: in, out    | the idea                   |
| ------------------ | -------- | --------------- | ----------------- | -------------------------- |
| `textbook`         | 2(k-1)   | 2               | (k-1) n           | sum on device 0, copy back |
| `key_value`        | 2(k-1)   | 2               | (k-1) n           | the same, with a store     |
| `tree`             | 2(k-1)   | 2 floor(log2 k) | ceil(log2 k) n    | sum pairs, pairs of pairs  |
| `sharded`          | 2k(k-1)  | 2               | 2(k-1)/k n        | each device sums one slice |
| `ring`             | 2k(k-1)  | 2(k-1)          | 2(k-1)/k n        | the same, by neighbors     |
| `halving_doubling` | 2k log2k | 2 log2k         | 2(k-1)/k n        | the same, by partners      |

Independent messages share a superstep. A superstep takes the latency of one message, plus the time
to transfer the bytes of its busiest device (record.py, plan.py). No allreduce can send and receive
less than 2(k-1)/k n. Few supersteps are best if latency is high, few bytes if bandwidth is low.

`textbook`, `tree` and `key_value` sum every element in the same order, wherever it is in a tensor.
They declare this with the attribute `elementwise = True`: a strategy may call them on any slice of
a bucket, for example once per bucket instead of once per parameter.

The store of `key_value` is on device 0; on a separate machine, k replaces k-1. Tests compare the
table with plans. `python -m lightning_mgpu trace NAME` counts the messages of your own function.
"""

from lightning_mgpu.allreduce.check import (
    Allreduce,
    check_allreduce,
    counts_to_check,
    find_allreduce,
)
from lightning_mgpu.allreduce.halving_doubling import halving_doubling_allreduce
from lightning_mgpu.allreduce.key_value import KeyValueStore, key_value_allreduce
from lightning_mgpu.allreduce.ring import ring_allreduce
from lightning_mgpu.allreduce.sharded import sharded_allreduce
from lightning_mgpu.allreduce.textbook import textbook_allreduce
from lightning_mgpu.allreduce.tree import tree_allreduce

__all__ = [
    "Allreduce",
    "KeyValueStore",
    "check_allreduce",
    "counts_to_check",
    "find_allreduce",
    "halving_doubling_allreduce",
    "key_value_allreduce",
    "ring_allreduce",
    "sharded_allreduce",
    "textbook_allreduce",
    "tree_allreduce",
]
