"""Threads for replicas: side by side, in turns, meeting, failing, and gone afterwards; alone, without a Trainer."""

import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu.strategies.threads.generators import generator_states, new_generator_states
from lightning_mgpu.strategies.threads.team import Team, _Meeting

CPU = torch.device("cpu")


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team([CPU] * 3)
    yield team
    team.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]


def test_replicas_run_side_by_side(team: Team) -> None:
    barrier = threading.Barrier(3, timeout=20)
    assert team.run(lambda i: (barrier.wait(), i)[1], [0, 1, 2]) == [0, 1, 2]
    assert team.run(lambda i: (threading.get_ident(), team.index), [0])[0] == (threading.get_ident(), 0)
    assert team.run(lambda i: team.index, [1, 2]) == [1, 2]
    assert team.index == 0 and not team.is_running


def test_exchange_gives_everybody_everything_in_order(team: Team) -> None:
    def meet_three_times(i: int) -> list[list[int]]:
        return [team.exchange(10 * n + i) for n in range(3)]

    for active in ([0, 1, 2], [0, 2], [1, 2], [1]):
        expected = [[10 * n + i for i in active] for n in range(3)]
        assert team.run(meet_three_times, active) == [expected] * len(active)
        turns = [generator_states(CPU) for _ in range(3)]
        assert team.run(meet_three_times, active, turns) == [expected] * len(active)


def test_in_turns_every_replica_draws_from_its_own_stream(team: Team) -> None:
    streams = [new_generator_states(CPU, seed) for seed in (5, 6, 7)]

    def draw(i: int) -> Tensor:
        first = torch.rand(2)
        team.exchange()
        return torch.cat([first, torch.rand(1)])

    drawn = [team.run(draw, [0, 1, 2], streams) for _ in range(2)]
    for i, seed in enumerate((5, 6, 7)):
        expected = torch.rand(6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.cat([drawn[0][i], drawn[1][i]]), expected)


def test_in_turns_only_one_runs(team: Team) -> None:
    inside: list[int] = []

    def alone(i: int) -> None:
        for _ in range(2):
            inside.append(i)
            time.sleep(0.01)
            assert inside == [i]
            inside.remove(i)
            team.exchange()

    team.run(alone, [0, 1, 2], [generator_states(CPU) for _ in range(3)])


@pytest.mark.usefixtures("four_threads")
def test_cores_are_shared_and_given_back() -> None:
    team = Team([CPU] * 2)
    seen = team.run(lambda i: torch.get_num_threads(), [0, 1])
    assert seen == [2, 2]
    assert torch.get_num_threads() == 4
    with pytest.raises(ZeroDivisionError):
        team.run(lambda i: 1 / 0, [0, 1])
    assert torch.get_num_threads() == 4
    assert team.run(lambda i: torch.get_num_threads(), [0]) == [4]  # alone, with all of them
    assert team.run(lambda i: torch.get_num_threads(), [0, 1], [generator_states(CPU)] * 2) == [4, 4]  # in turns too
    team.close()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_modes_of_the_caller_hold_in_every_replica(team: Team, inference: bool, grad: bool) -> None:
    def modes(_: int) -> tuple[Any, ...]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), product.dtype, product.is_inference()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        assert team.run(modes, [0, 1, 2]) == [(inference, grad, torch.bfloat16, inference)] * 3
    assert team.run(modes, [0, 1, 2]) == [(False, True, torch.float32, False)] * 3


def test_context_and_default_device_of_the_caller_hold_in_every_replica(team: Team) -> None:
    """Settings of torch.compile are context variables in torch 2.15, and so may be a user's."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def look(i: int) -> tuple[int, int, str]:
        return variable.get(), dynamo.cache_size_limit, torch.zeros(()).device.type

    before = look(0)
    assert team.run(look, [0, 1, 2]) == [before] * 3
    variable.set(1)
    with torch.device("meta"), dynamo.patch(cache_size_limit=99):
        assert team.run(look, [0, 1, 2]) == [(1, 99, "meta")] * 3
    assert team.run(look, [1, 2]) == [(1, *before[1:])] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("in_turns", [False, True])
def test_a_failure_releases_those_who_wait(team: Team, failing: int, in_turns: bool) -> None:
    def step(i: int) -> None:
        team.exchange()
        if i == failing:
            raise LookupError("lost")
        team.exchange()
        raise AssertionError("nobody gets here")

    turns = [generator_states(CPU) for _ in range(3)] if in_turns else None
    before = torch.get_rng_state()
    with pytest.raises(LookupError, match="lost") as raised:
        team.run(step, [0, 1, 2], turns)
    [note] = getattr(raised.value, "__notes__", raised.value.args)  # Python 3.10 has no notes
    assert f"raised in replica {failing} on cpu" in note
    assert team.run(lambda i: team.exchange(i), [0, 1, 2]) == [[0, 1, 2]] * 3  # and the next step works
    if not in_turns:
        assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_counts_before_others_see_its_end(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its thread gets no time between the two: else the others' complaint would hide it."""
    fail = _Meeting.fail

    def slowly(self: _Meeting, i: int, error: BaseException) -> None:
        if isinstance(error, LookupError):
            time.sleep(0.3)
        fail(self, i, error)

    def step(i: int) -> None:
        if i == 2:
            raise LookupError("lost")
        team.exchange()

    monkeypatch.setattr(_Meeting, "fail", slowly)
    with pytest.raises(LookupError, match="lost"):
        team.run(step, [0, 1, 2])


@pytest.mark.parametrize("in_turns", [False, True])
def test_one_who_does_not_come_is_named(team: Team, in_turns: bool) -> None:
    turns = [generator_states(CPU) for _ in range(3)] if in_turns else None
    with pytest.raises(RuntimeError, match="replica 1, which has ended its step"):
        team.run(lambda i: team.exchange() if i != 1 else None, [0, 1, 2], turns)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_come_through(team: Team, failing: int, kind: type[BaseException]) -> None:
    def step(i: int) -> None:
        if i == failing:
            raise kind
        team.exchange()

    with pytest.raises(kind):
        team.run(step, [0, 1, 2])


def test_results_are_not_kept(team: Team) -> None:
    class Result:
        pass

    results = team.run(lambda i: Result(), [0, 1, 2])
    alive = [weakref.ref(result) for result in results]
    del results
    gc.collect()
    time.sleep(0.05)
    assert [ref() for ref in alive] == [None] * 3
