"""Allreduce by hand: `allreduce(tensors)` leaves the sum of k tensors, one per device, in each.

An algorithm is a plain function over a list of tensors, so it can be read, tested and swapped by
itself; `check_allreduce` holds yours to the same contract. What each costs for k devices and
tensors of n bytes (a round is the time in which every device can send one message and receive one):

| file        | messages | rounds           | busiest sends and gets  | the idea                   |
| ----------- | -------- | ---------------- | ----------------------- | -------------------------- |
| `textbook`  | 2(k-1)   | 2(k-1)           | (k-1) n                 | sum on device 0, copy back |
| `key_value` | 2(k-1)   | 2(k-1)           | (k-1) n                 | the same, with a store     |
| `tree`      | 2(k-1)   | 2 ceil(log2 k)   | ceil(log2 k) n          | sum pairs, pairs of pairs  |
| `sharded`   | 2k(k-1)  | 2(k-1), each n/k | 2(k-1)/k n, lower bound | each device sums one slice |
| `ring`      | 2k(k-1)  | 2(k-1), each n/k | 2(k-1)/k n, lower bound | the same, by neighbours    |

The store of `key_value` is on device 0; with a machine of its own, k takes the place of k-1. A test
counts all of these, and `python -m lightning_mgpu allreduce NAME` counts yours.

Few large messages win when each has a high fixed cost, small even ones when bandwidth limits.

`textbook`, `tree` and `key_value` add every element in the same order, whatever else is in the
tensor. They say so by an attribute, `elementwise = True`: a strategy may call them on any slice of
a bucket of gradients, for example once per bucket instead of once per parameter.
"""

from lightning_mgpu.allreduce.check import (
    Allreduce,
    check_allreduce,
    find_allreduce,
)
from lightning_mgpu.allreduce.key_value import KeyValueStore, key_value_allreduce
from lightning_mgpu.allreduce.ring import ring_allreduce
from lightning_mgpu.allreduce.sharded import sharded_allreduce
from lightning_mgpu.allreduce.textbook import textbook_allreduce
from lightning_mgpu.allreduce.tree import tree_allreduce

__all__ = [
    "Allreduce",
    "KeyValueStore",
    "check_allreduce",
    "find_allreduce",
    "key_value_allreduce",
    "ring_allreduce",
    "sharded_allreduce",
    "textbook_allreduce",
    "tree_allreduce",
]
