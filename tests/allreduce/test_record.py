"""What cannot run as written raises an error that names the line of the function."""

import copy
import random
import re
import threading

import numpy as np
import pytest
import torch

from lightning_mgpu.allreduce import KeyValueStore, textbook_allreduce
from lightning_mgpu.allreduce.record import record

LIKE = torch.empty(4, device="meta")
NAMES = {"CALLS": [], "KEPT": [], "COUNTER": torch.zeros(1), "np": np}
NAMES |= {x.__name__: x for x in (copy, random, torch, KeyValueStore, textbook_allreduce)}
VALUES = "no values or memory"
AGAIN = "behaves differently when it is called again"
DRAWS = "draws random numbers"
OUTSIDE = "that is on the host, or from outside"
HOST = "moves data from or to cpu"


ERRORS = {  # a function's lines; the one that is named is the last, or has a mark
    "if t[0].sum() > 0:  # here\n  textbook_allreduce(t)": VALUES,
    "t[0].mul_(t[1].mean().item())": VALUES,
    "if not torch.equal(t[0], t[1]):  # here\n  textbook_allreduce(t)": VALUES,
    "t[1].copy_(t[0][t[0] > 0].sum())": VALUES,
    "if t[0].data_ptr() != t[1].data_ptr():  # here\n  textbook_allreduce(t)": VALUES,
    "copy.deepcopy(t[0])": VALUES,
    # errors that the function catches
    "try:\n  t[0].numpy()  # here\n except Exception:\n  textbook_allreduce(t)": VALUES,
    "try:\n  float(t[0][0])  # here\n except ValueError:\n  textbook_allreduce(t)": VALUES,
    "CALLS.append(1)\n textbook_allreduce(t if len(CALLS) % 2 else t[::-1])": AGAIN,
    "t[0].mul_(random.random())": AGAIN,
    "t[0].mul_(torch.from_numpy(np.random.rand(4)))": AGAIN,
    "CALLS.append(1)\n t[0].zero_()\n for _ in CALLS:\n  t[1].zero_()": AGAIN,
    "COUNTER.add_(1)  # here\n t[0].mul_(COUNTER)": OUTSIDE,
    "total = torch.zeros(4)\n for each in t:\n  total += each": OUTSIDE,
    "if KEPT:\n  t[0].add_(KEPT.pop())  # here\n KEPT.append(t[0].clone())": "of an earlier call",
    "t[0].add_(torch.rand(4))": DRAWS,
    "t[0].add_(torch.rand_like(t[0]))": DRAWS,
    "torch.nn.functional.dropout(t[0], inplace=True)": DRAWS,
    "t[0].copy_(sum(each.cpu() for each in t))": HOST,
    "KeyValueStore(torch.device('cpu')).push('gradient', 0, t[0])": HOST,
    "t[1] = t[0] + 1": r"use tensors\[i\].copy_",
    "t[1].data = t[0] + 1": "such as `data`",
    "t[1].set_(t[0].clone())": "changes the shape or memory",
    "t[1].resize_(2)": "changes the shape or memory",
    "torch.aminmax(t[0], out=(t[0][0], t[1][0]))": "on several devices at once",
    "raise KeyError('a\\nb')": r"it raises KeyError: 'a\\nb'",
}


@pytest.mark.parametrize("body", ERRORS)
def test_refuses_in_one_line(body):
    lines = body.splitlines()
    number = next((i for i, line in enumerate(lines) if "# here" in line), len(lines) - 1)
    exec(compile(f"def refused(t):\n {body}", "mine.py", "exec"), {**NAMES}, names := {})
    with pytest.raises(ValueError, match=ERRORS[body]) as caught:
        record(names["refused"], 3, LIKE)
    said = str(caught.value)
    assert said.startswith(f"mine.py:{number + 2} cannot run as written: ")
    assert said.endswith("; as_written=false calls the function on gathered gradients")
    assert "\n" not in said


def test_refuses_threads_and_what_was_kept():
    kept = []

    def starts_a_thread(t):
        def add():
            with pytest.raises(ValueError, match="another thread"):
                t[0].add_(1)

        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
        kept[:] = t

    with pytest.raises(ValueError, match="another thread, or after the call"):
        record(starts_a_thread, 2, LIKE)
    with pytest.raises(ValueError, match="another thread, or after the call"):
        kept[0].add_(1)


def test_slots_may_be_added_to():
    def function(t):
        t[0] += t[1].to(t[0].device)

    assert re.search("add_", str(record(function, 2, LIKE).describe()))


def test_recording_touches_no_gpu_and_no_random_numbers():
    state = torch.get_rng_state()
    record(textbook_allreduce, 2, LIKE)
    assert torch.equal(torch.get_rng_state(), state) and not torch.cuda.is_initialized()
