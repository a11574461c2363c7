"""Allreduce, written by hand: `allreduce(tensors)` leaves the sum of k tensors, one a device, in every one of them.

An algorithm is a plain function over a list of tensors, so it can be read, tested and swapped by itself;
`check_allreduce` holds yours to the same contract. What each costs for k devices and tensors of n bytes (a round is the
time in which every device can send one message and receive one):

| file         | messages  | rounds           | worst device sends, and receives | the idea                           |
| ------------ | --------- | ---------------- | -------------------------------- | ---------------------------------- |
| `textbook`   | 2(k-1)    | 2(k-1)           | (k-1) n                          | sum on device 0, copy back         |
| `tree`       | 2(k-1)    | 2 ceil(log2 k)   | ceil(log2 k) n                   | sum in pairs, pairs of pairs, ...  |
| `sharded`    | 2k(k-1)   | 2(k-1), each n/k | 2(k-1)/k n, the lower bound      | every device sums one slice        |
| `ring`       | 2k(k-1)   | 2(k-1), each n/k | 2(k-1)/k n, the lower bound      | the same, talking to neighbours    |

Few large messages win when each message has a high fixed cost, small even ones when bandwidth is what limits.
"""

from lightning_mgpu.allreduce.check import Allreduce, check_allreduce
from lightning_mgpu.allreduce.ring import ring_allreduce
from lightning_mgpu.allreduce.sharded import sharded_allreduce
from lightning_mgpu.allreduce.textbook import textbook_allreduce
from lightning_mgpu.allreduce.tree import tree_allreduce

__all__ = [
    "Allreduce",
    "check_allreduce",
    "ring_allreduce",
    "sharded_allreduce",
    "textbook_allreduce",
    "tree_allreduce",
]
