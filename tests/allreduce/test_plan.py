"""Plans run as their functions do, bitwise, and send the bytes that the literature states."""

import random
import re
import types
from math import ceil, floor, log2
from pathlib import Path

import pytest
import torch

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import find_allreduce
from lightning_mgpu.allreduce.plan import Execution, run_plan
from lightning_mgpu.allreduce.record import __file__ as RECORD
from lightning_mgpu.allreduce.record import record
from tests.conftest import REPOSITORY

ROWS = re.findall(r"^\| `(\w+)` +\| ([^|]+)\| ([^|]+)\| ([^|]+)\|", allreduce.__doc__, re.MULTILINE)
LIKE = torch.empty(2520, device="meta")  # 2520 is divisible by 2 .. 9
LAYOUTS = {
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0),
    "smaller than k": lambda: torch.randn(3),
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5, 7).bfloat16(),
}


def runs_as_called(function, inputs, record=record):
    called, written = ([x.clone() for x in inputs] for _ in range(2))
    function(called)
    run_plan(record(function, len(inputs), inputs[0]), written)
    return [bits(x) for x in called] == [bits(x) for x in written]


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


def readme_chain():
    [code] = re.findall(
        r"```python\n# my_allreduce.py\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S
    )
    exec(compile(code, "my_allreduce.py", "exec"), names := {})
    return names["chain_allreduce"]


def constants_and_lists(tensors):
    first, second, third = tensors
    first.mul_(torch.arange(4.0)).add_(torch.zeros(4))
    second.mul_(torch.tensor(2.0, device=second.device)).add_(second.new_tensor([1, 2, 3, 4.0]))
    second += torch.ones_like(first, device=second.device)
    third[1:3] = first[torch.tensor([0, 1])].half()
    third.data.add_(torch.linalg.vector_norm(first) * float("nan"))
    tensors[0] += torch.cumsum(second, 0).to(first.device, torch.float64)
    torch._foreach_mul_([first, second], [2.0, 3.0])
    norms = torch._foreach_norm(torch._foreach_add([first, second], [third, third], alpha=2))
    torch.where(second > 0, norms[1], third.sort().values, out=second)


@torch.inference_mode()
def in_inference_mode(tensors):
    allreduce.ring_allreduce([t.reshape(2, 2) for t in tensors])


def program(seed, k, n):
    """Random operations on slices of k tensors (n,) and of temporary ones."""

    def run(tensors):
        r, pool = random.Random(seed), [*tensors]
        for _ in range(r.randint(3, 25)):
            run_one(r, tensors, pool, n)

    return run


def run_one(r, tensors, pool, n):
    a, b, target = r.choice(pool), r.choice(pool).clone(), r.choice(tensors).device
    i, j = sorted(r.sample(range(n + 1), 2))
    begin = r.randint(0, n - (j - i))
    part, other, here = a[i:j], b[begin : begin + j - i], a.device
    operations = [
        lambda: part.add_(other.to(here)),
        lambda: part.copy_(other),
        lambda: part.zero_(),
        lambda: part.fill_(r.random()),
        lambda: a.mul_(0.5),
        lambda: torch.add(a, b.to(here), out=a),
        lambda: a.__setitem__(slice(i, j), other.to(here) * 2),
        lambda: torch._foreach_add_([*tensors], [b.to(t.device) for t in tensors]),
        lambda: pool.append(b.to(target)),
        lambda: pool.append(torch.empty_like(b, device=target).copy_(b)),
        lambda: pool.append(a + b.to(here)),
        lambda: pool.append(torch.cat([a[:i], b[i:].to(here)])),
        lambda: pool.append(torch.stack([t.clone().to(here) for t in tensors]).sum(0)),
    ]
    r.choice(operations)()


def is_right(seed, record=record):
    k = 2 + seed % 3
    inputs = [*torch.randn(k, 6, generator=torch.Generator().manual_seed(seed))]
    return runs_as_called(program(seed, k, 6), inputs, record)


def test_random_programs():
    first = random.randrange(10**6)
    print(f"seeds {first} to {first + 99}")
    assert [seed for seed in range(first, first + 100) if not is_right(seed)] == []


@pytest.mark.parametrize("hazard", ["read after write", "write after write", "write after read"])
def test_random_programs_find_each_hazard_that_is_left_out(hazard):
    source = Path(RECORD).read_text()
    without, count = re.subn(rf"^.*# {hazard}$", "", source, flags=re.MULTILINE)
    mutant = types.ModuleType("mutant")
    mutant.__file__ = RECORD
    exec(compile(without, RECORD, "exec"), vars(mutant))
    assert count == 1
    assert not all(is_right(seed, mutant.record) for seed in range(100))


@pytest.mark.parametrize("name", [row[0] for row in ROWS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_algorithms_run_as_called(name, layout):
    for k in (1, 2, 3, 4, 8):
        if name != "halving_doubling" or k != 3:
            assert runs_as_called(find_allreduce(name), [LAYOUTS[layout]() for _ in range(k)]), k


@pytest.mark.parametrize("function", [constants_and_lists, in_inference_mode])
def test_other_operators_run_as_called(function):
    assert runs_as_called(function, [torch.randn(4) for _ in range(3)])


def test_empty_tensors_are_not_sent():
    plan = record(allreduce.ring_allreduce, 4, LIKE[:0])
    assert (plan.messages, plan.num_supersteps) == ([], 0)
    plan = record(allreduce.ring_allreduce, 4, LIKE[:3])  # one chunk of four is empty
    assert len(plan.messages) == 3 * 2 * 3 and sum(plan.sent) == len(plan.messages) * 4


def evaluate(formula, k):
    """A cell of the cost table for k devices and tensors of one byte."""
    formula = re.sub(r"log2 ?k", "log2(k)", formula.strip())
    product = re.sub(r"(?<=[\dk)]) ?(?=[(kn]|log|floor)", "*", formula)  # 2(k-1) n -> 2*(k-1)*n
    product = re.sub(r"(log2|floor|ceil)\*", r"\1", product)
    names = {"k": k, "n": 1, "log2": log2, "floor": floor, "ceil": ceil}
    return eval(product, names) if k > 1 else 0


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_cost_table(row, k):
    name, *cells = row
    if name == "halving_doubling" and k & (k - 1):
        with pytest.raises(ValueError, match=rf"halving_doubling.py:\d+ .* {k} devices: "):
            record(find_allreduce(name), k, LIKE)
        return
    plan = record(find_allreduce(name), k, LIKE)
    busiest = [max(each) / LIKE.nbytes for each in (plan.sent, plan.received)]
    messages, supersteps, share = (evaluate(cell, k) for cell in cells)
    assert [len(plan.messages), plan.num_supersteps] == [messages, supersteps]
    assert busiest == pytest.approx([share, share])


@pytest.mark.parametrize(
    ("function", "k", "supersteps", "sent"),
    [
        ("textbook", 4, 2, [3, 1, 1, 1]),
        ("tree", 4, 4, [2, 1, 2, 1]),
        ("ring", 4, 6, [1.5] * 4),
        (readme_chain(), 4, 6, [1, 2, 2, 1]),
    ],
)
def test_literature(function, k, supersteps, sent):
    function = find_allreduce(function) if isinstance(function, str) else function
    plan = record(function, k, LIKE)
    assert plan.num_supersteps == supersteps
    assert [num_bytes / LIKE.nbytes for num_bytes in plan.sent] == sent
    assert runs_as_called(function, [torch.randn(16) for _ in range(k)])


def test_messages_are_packed_into_the_rows_that_travel():
    """Of several dtypes: each begins at a multiple of its element's size."""

    def function(tensors):
        first, second = tensors
        for dtype in (torch.uint8, torch.float64, torch.half):
            second.add_(first[:3].to(dtype).to(second.device).sum())

    plan = record(function, 2, LIKE[:9])
    assert [message.begin for message in plan.messages] == [0, 8, 32]
    [begin, end] = plan.steps_of(0)
    assert (begin.bytes_to, begin.bytes_from, end.bytes_to) == ([0, 38], [0, 0], [0, 0])
    tensors = [torch.arange(9.0), torch.zeros(9)]
    sender, receiver = (Execution(plan, rank, tensor) for rank, tensor in enumerate(tensors))
    row = torch.full((64,), 255, dtype=torch.uint8)
    sender.advance(0, [row[:0], row[16:54]])
    assert row[16:19].tolist() == [0, 1, 2] and row[54:].tolist() == [255] * 10
    receiver.advance(0)
    receiver.receive(0, [row[16:54], row[:0]])
    receiver.advance(1)
    assert tensors[1].tolist() == [9.0] * 9
    assert runs_as_called(function, [torch.randn(9).abs() for _ in range(2)])
    with pytest.raises(ValueError, match=r"the plan is for a tensor of .*\[9\].*, not of .*\[8\]"):
        Execution(plan, 0, torch.zeros(8))


def test_digest_is_equal_in_all_processes_and_differs_with_the_plan():
    def scaled(factor):
        return lambda tensors: tensors[0].mul_(factor)

    constants = [torch.tensor([0.0, 1]), torch.tensor([-0.0, 1]), torch.tensor([0, 1])]
    functions = [*map(scaled, [2, 2.0, 0.1 + 0.2, 0.3, *constants]), allreduce.ring_allreduce]
    likes = [LIKE[:2], LIKE[:2].double(), LIKE.as_strided((2,), (2,))]
    digests = [record(function, 2, likes[0]).digest() for function in functions]
    digests += [record(functions[0], 2, like).digest() for like in likes[1:]]
    assert len({*digests}) == len(digests)
