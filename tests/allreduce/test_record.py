"""What cannot run as it is written is refused in one line that names the line of the function."""

import copy
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_mgpu.allreduce import KeyValueStore, textbook_allreduce
from lightning_mgpu.allreduce.record import record

LIKE = torch.empty(4, device="meta")
COUNTER = torch.zeros(1)
CALLS, RESIDUALS = [], []


def branches(t):
    if t[0].sum() > 0:  # here
        textbook_allreduce(t)


def takes_an_item(t):
    t[0].mul_(t[1].mean().item())  # here


def catches_the_branch(t):
    try:
        if t[0].sum() > 0:  # here
            t[0].mul_(2)
    except Exception:
        pass
    textbook_allreduce(t)


def catches_float(t):
    try:
        float(t[0][0])  # here
    except RuntimeError:
        pass
    except ValueError:
        textbook_allreduce(t)


def catches_numpy(t):
    try:
        t[0].numpy()  # here
    except Exception:
        textbook_allreduce(t)


def compares(t):
    if not torch.equal(t[0], t[1]):  # here
        textbook_allreduce(t)


def selects(t):
    t[1].copy_(t[0][t[0] > 0].sum())  # here


def reads_the_pointer(t):
    if t[0].data_ptr() != t[1].data_ptr():  # here
        textbook_allreduce(t)


def copies_deeply(t):
    copy.deepcopy(t[0])  # here


def alternates(t):
    CALLS.append(1)
    textbook_allreduce(t if len(CALLS) % 2 else t[::-1])  # here


def scales_at_random(t):
    t[0].mul_(random.random())  # here


def scales_by_numpy(t):
    t[0].mul_(torch.from_numpy(np.random.rand(4)))  # here # noqa: NPY002


def sometimes_does_more(t):
    CALLS.append(1)
    t[0].zero_()
    for _ in CALLS:
        t[1].zero_()  # here


def counts_outside(t):
    COUNTER.add_(1)  # here
    t[0].mul_(COUNTER)


def keeps_a_residual(t):
    if RESIDUALS:
        t[0].add_(RESIDUALS.pop())  # here
    RESIDUALS.append(t[0].clone())


def draws_on_the_host(t):
    t[0].add_(torch.rand(4))  # here


def draws_on_the_device(t):
    t[0].add_(torch.rand_like(t[0]))  # here


def drops_out(t):
    torch.nn.functional.dropout(t[0], inplace=True)  # here


def sums_on_the_host(t):
    total = torch.zeros(4)
    for each in t:
        total += each  # here


def moves_to_the_host(t):
    t[0].copy_(sum(each.cpu() for each in t))  # here


def has_its_store_on_the_host(t):
    store = KeyValueStore(torch.device("cpu"))
    for i, each in enumerate(t):
        store.push("gradient", i, each)  # here


def rebinds_a_slot(t):
    t[1] = t[0] + 1  # here


def rebinds_data(t):
    t[1].data = t[0] + 1  # here


def sets(t):
    t[1].set_(t[0].clone())  # here


def resizes(t):
    t[1].resize_(2)  # here


def writes_to_two_devices(t):
    torch.aminmax(t[0], out=(t[0][0], t[1][0]))  # here


def raises(t):
    raise KeyError("a\nb")  # here


REFUSED = {
    "no values or memory": [
        branches,
        takes_an_item,
        catches_the_branch,
        catches_float,
        catches_numpy,
        compares,
        selects,
        reads_the_pointer,
        copies_deeply,
    ],
    "behaves differently when it is called again": [
        alternates,
        scales_at_random,
        scales_by_numpy,
        sometimes_does_more,
    ],
    "that is on the host, or from outside": [counts_outside, sums_on_the_host],
    "a tensor of an earlier call": [keeps_a_residual],
    "draws random numbers": [draws_on_the_host, draws_on_the_device, drops_out],
    "moves data from or to cpu": [moves_to_the_host, has_its_store_on_the_host],
    r"use tensors\[i\].copy_": [rebinds_a_slot],
    "such as `data`": [rebinds_data],
    "changes the shape or memory": [sets, resizes],
    "on several devices at once": [writes_to_two_devices],
    r"it raises KeyError: 'a\\nb'": [raises],
}


@pytest.mark.parametrize(
    ("reason", "function"),
    [(reason, function) for reason, functions in REFUSED.items() for function in functions],
)
def test_refuses_in_one_line(reason, function):
    code, source = function.__code__, Path(__file__).read_text().splitlines()
    lines = range(code.co_firstlineno, len(source) + 1)
    number = next(i for i in lines if "# here" in source[i - 1])
    with pytest.raises(ValueError, match=reason) as caught:
        record(function, 3, LIKE)
    said = str(caught.value)
    assert said.startswith(f"test_record.py:{number} cannot run as written: ")
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
