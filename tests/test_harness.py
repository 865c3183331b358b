"""The harness is trusted by every other test, so it is tested first."""

import os
import signal
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.harness import Pool, WorldFailed, WorldHung


def where_am_i(greeting: str, *, mark: str = ".") -> tuple[str, int, int, str]:
    return greeting + mark, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]


def sum_of_ranks() -> dict[str, torch.Tensor]:
    total = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(total)
    return {"total": total, "view": torch.arange(10)[2:4]}


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int, message: str) -> None:
    if dist.get_rank() == rank:
        raise KeyError(message)
    dist.barrier()


def raise_everywhere() -> None:
    raise ValueError("no such preset")


def raise_out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    raise ValueError("one rank had already sent something")


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int, sig: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), sig)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def warn() -> None:
    warnings.warn("noise of this very test", UserWarning, stacklevel=1)


def leave_traces() -> tuple[str | None, float]:
    seen = os.environ.get("SHARDWISE_TRACE"), torch.rand(()).item()
    os.environ["SHARDWISE_TRACE"] = "left"
    return seen


def initialised() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return before, int(total)


@pytest.mark.quick("1", "4")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_back_by_rank(run_ranks: Pool, size: int) -> None:
    results = run_ranks(size, where_am_i, "hello", mark="!")
    assert results == [("hello!", rank, size, str(rank)) for rank in range(size)]


def test_tensors_come_back_by_value(run_ranks: Pool) -> None:
    results = run_ranks(2, sum_of_ranks)
    for result in results:
        assert result["total"].tolist() == [1.0, 1.0, 1.0]
        assert result["view"].tolist() == [2, 3]
        assert result["view"].untyped_storage().nbytes() == 16


def test_partial_functions_travel(run_ranks: Pool) -> None:
    assert run_ranks(1, partial(where_am_i, "hi", mark="?"))[0][0] == "hi?"


def test_ranks_are_real_processes_and_stay(run_ranks: Pool) -> None:
    first = run_ranks(2, process_id)
    assert len({os.getpid(), *first}) == 3
    assert run_ranks(2, process_id) == first


def test_a_job_leaves_no_traces(run_ranks: Pool) -> None:
    first, second = run_ranks(1, leave_traces), run_ranks(1, leave_traces)
    assert first == second
    assert first[0][0] is None


def test_the_failing_rank_comes_first(run_ranks: Pool) -> None:
    before = run_ranks(3, process_id)
    with pytest.raises(WorldFailed) as caught:
        run_ranks(3, raise_on, 1, "the root cause")
    message = str(caught.value)
    assert message.startswith("raise_on on 3 ranks: rank 1 raised")
    assert message.index("KeyError: 'the root cause'") < message.index("rank 0 was still running")
    assert "in raise_on" in message  # the remote traceback
    assert "barrier" in message  # where the others stood
    assert [ending.kind for ending in caught.value.endings] == ["hung", "raised", "hung"]
    assert not set(run_ranks(3, process_id)) & set(before)


def test_refusals_are_returned_and_the_world_lives_on(run_ranks: Pool) -> None:
    before = run_ranks(2, process_id)
    assert run_ranks.errors(2, raise_everywhere) == ["ValueError: no such preset"] * 2
    assert run_ranks(2, process_id) == before
    assert run_ranks.errors(2, process_id) == [None, None]


def test_a_refusal_out_of_step_replaces_the_world(run_ranks: Pool) -> None:
    before = run_ranks(2, process_id)
    assert run_ranks.errors(2, raise_out_of_step) == ["ValueError: one rank had already sent something"] * 2
    assert not set(run_ranks(2, process_id)) & set(before)


def test_a_hung_world_is_killed_at_the_deadline(run_ranks: Pool) -> None:
    before = run_ranks(2, process_id)
    began = time.monotonic()
    with pytest.raises(WorldHung, match="rank 1 was still running") as caught:
        run_ranks(2, sleep_on, 1, deadline=2.0)
    assert time.monotonic() - began < 10
    assert "in sleep_on" in str(caught.value)
    assert [ending.kind for ending in caught.value.endings] == ["returned", "hung"]
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(run_ranks(2, process_id)) == 2


def test_a_killed_rank_is_the_root_cause(run_ranks: Pool) -> None:
    with pytest.raises(WorldFailed, match=r"rank 1 died .* killed by SIGKILL"):
        run_ranks(2, die_on, 1, signal.SIGKILL)


def test_a_throwaway_world_tells_what_the_others_saw(run_ranks: Pool) -> None:
    survivor, victim = run_ranks.throwaway(2, die_on, 1, signal.SIGKILL, group_timeout_s=20)
    assert (victim.kind, victim.exitcode) == ("died", -signal.SIGKILL)
    assert survivor.kind == "raised"
    assert survivor.error.startswith("RuntimeError")
    assert survivor.seconds < 20


def test_ranks_can_be_left_to_initialise_themselves(run_ranks: Pool) -> None:
    endings = run_ranks.throwaway(2, initialised, join_group=False)
    assert [ending.value for ending in endings] == [(False, 2)] * 2


def test_warnings_are_errors_in_the_ranks_too(run_ranks: Pool) -> None:
    assert run_ranks.errors(1, warn) == ["UserWarning: noise of this very test"]


@pytest.mark.filterwarnings("ignore:noise of this very test")
def test_a_filter_of_the_test_holds_in_the_ranks(run_ranks: Pool) -> None:
    assert run_ranks(1, warn) == [None]
