"""Saving while training goes on: the same bytes, of the moment it was asked for; failures are heard by all at once."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.base.errors import SaveError, StateError
from shardwise.checkpoint import saving as save
from shardwise.core.engine.guards import engine_of
from tests.checkpoint.test_refusals import built, step
from tests.harness import Pool


@contextmanager
def held() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    go_on, write = threading.Event(), save._write_own_file

    def wait_and_write(*args: Any) -> Any:
        assert go_on.wait(60)
        return write(*args)

    save._write_own_file = wait_and_write
    try:
        yield go_on
    finally:
        go_on.set()
        save._write_own_file = write


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.glob("*.safetensors")}


def index_of(path: Path) -> Any:
    index = json.loads((path / "index.json").read_text())
    del index["origin"]["written"]
    return index


def save_both_ways(path: Path, strategy: str, whole: bool) -> None:
    model, optimizer = built(strategy)
    step(model, optimizer)
    sw.save(path / "now", model, optimizer, extra={"step": 1}, whole=whole)
    sw.start_save(path / "beside", model, optimizer, extra={"step": 1}, whole=whole).finish()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_both_ways_write_the_same_bytes(run_ranks: Pool, tmp_path: Path, strategy: str, whole: bool) -> None:
    run_ranks(2, save_both_ways, tmp_path, strategy, whole)
    assert digests(tmp_path / "now") == digests(tmp_path / "beside")
    assert len(digests(tmp_path / "now")) == 2
    assert index_of(tmp_path / "now") == index_of(tmp_path / "beside")


def save_while_training(path: Path) -> None:
    model, optimizer = built("zero2")
    step(model, optimizer)
    asked = sw.full_state_dict(model)
    extra = {"step": 1}
    with held() as go_on:
        saving = sw.start_save(path, model, optimizer, extra=extra)
        extra["step"] = 7
        for number in range(1, 4):
            step(model, optimizer, number)
        assert not saving.is_finished
        assert not saving.is_complete
        go_on.set()
        saving.finish()
    assert saving.is_complete
    trained = sw.full_state_dict(model)
    assert not torch.equal(asked["first.weight"], trained["first.weight"])
    # Back at the moment of the save, and the same way again.
    assert sw.load(path, model, optimizer) == {"step": 1}
    assert all(torch.equal(value, asked[name]) for name, value in sw.full_state_dict(model).items())
    for number in range(1, 4):
        step(model, optimizer, number)
    assert all(torch.equal(value, trained[name]) for name, value in sw.full_state_dict(model).items())


def test_what_is_saved_is_what_it_was_when_it_was_asked_for(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_while_training, tmp_path / "here")


def save_one_after_another(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    engine = engine_of(model)
    for kind in ("save", "start_save"):
        with held() as go_on:
            first = sw.start_save(path / f"first {kind}", model, optimizer)
            memory = save._host_memory[engine].row.data_ptr()
            threading.Timer(0.2, go_on.set).start()
            getattr(sw, kind)(path / f"second {kind}", model, optimizer)
            assert first.is_complete
            assert (path / f"first {kind}" / "complete").is_file()
            step(model, optimizer)
        assert save._host_memory[engine].row.data_ptr() == memory, "the copies are made where they were"
    save.finish_background_save()
    dist.barrier()
    assert digests(path / "second save").keys() == digests(path / "second start_save").keys()
    assert not engine.at_step, "nothing is left to say"


def test_the_next_save_waits_for_the_last_and_uses_its_memory(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_one_after_another, tmp_path)


def save_two_models(path: Path) -> None:
    models = [built(), built("zero2")]
    with held() as go_on:
        first = sw.start_save(path / "first", *models[0])
        threading.Timer(0.2, go_on.set).start()
        second = sw.start_save(path / "second", *models[1])
        assert first.is_complete
    second.finish()
    for name, (model, optimizer) in zip(("first", "second"), models, strict=True):
        sw.load(path / name, model, optimizer)


def test_saves_of_two_models_do_not_mix(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_two_models, tmp_path)


def load_waits(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    with held() as go_on:
        sw.start_save(path, model, optimizer, extra={"step": 1})
        threading.Timer(0.1, go_on.set).start()
        assert sw.load(path, model, optimizer) == {"step": 1}


def test_a_load_waits_too(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_waits, tmp_path / "here")


# ---------------------------------------------------------------------------------------------------------
# failures


def fail_on(rank: int) -> None:
    write = save._write_own_file

    def fail(*args: Any) -> Any:
        save._write_own_file = write
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return write(*args)

    save._write_own_file = fail


def steps_until_told(model: Any, optimizer: Any, delay_s: float) -> tuple[int, str]:
    """How many steps were taken until one raised."""
    for number in range(200):
        time.sleep(delay_s)  # a rank that is behind the others
        model(torch.ones(2, 16)).square().mean().backward()
        try:
            optimizer.step()
        except SaveError as error:
            return number, str(error)
        optimizer.zero_grad()
    raise AssertionError("nobody was told")


def hear_of_failures(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})
    for rank in range(2):
        fail_on(rank)
        saving = sw.start_save(path, model, optimizer, extra={"step": 2})
        told = everywhere(steps_until_told(model, optimizer, 0.01 * dist.get_rank()))
        assert told[0] == told[1]
        assert told[0][1].startswith(f"rank {rank}: OSError: [Errno 28] No space left")
        with pytest.raises(sw.CheckpointError):
            saving.finish()  # it says so whenever it is asked
        assert not saving.is_complete
        # The update that was refused can be done now, and the next save is good.
        optimizer.step()
        optimizer.zero_grad()
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        assert sw.load(path, model, optimizer) == {"step": 1}
    sw.start_save(path, model, optimizer, extra={"step": 3}).finish()
    assert sw.load(path, model, optimizer) == {"step": 3}


def test_a_failure_is_raised_by_the_same_step_on_every_rank(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, hear_of_failures, tmp_path / "run" / "here")


def hear_of_it_elsewhere(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    asks = {
        "finish": lambda saving: saving.finish(),
        "save": lambda _: sw.save(path, model, optimizer),
        "start_save": lambda _: sw.start_save(path, model, optimizer),
        "load": lambda _: sw.load(path, model, optimizer),
    }
    for ask in asks.values():
        fail_on(1)
        saving = sw.start_save(path, model, optimizer)
        with pytest.raises(sw.CheckpointError, match=r"rank 1: .*No space left"):
            ask(saving)
        step(model, optimizer)  # which has nothing to say any more
    sw.save(path, model, optimizer)


def test_without_a_step_the_next_call_raises_it(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, hear_of_it_elsewhere, tmp_path / "here")


def copy_fails(path: Path) -> None:
    """No memory for the copies on one rank: an error at once on all, and nothing is under way."""
    model, optimizer = built()
    step(model, optimizer)
    take = save.copy_to_host

    def fail(*_: Any) -> Any:
        raise MemoryError("no host memory")

    if dist.get_rank() == 1:
        save.copy_to_host = fail
    try:
        with pytest.raises(sw.CheckpointError, match="rank 1: MemoryError: no host memory"):
            sw.start_save(path, model, optimizer)
    finally:
        save.copy_to_host = take
    sw.start_save(path, model, optimizer).finish()


def test_a_copy_that_fails_is_an_error_at_once(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, copy_fails, tmp_path / "here")


def save_from_disk(path: Path) -> None:
    model, optimizer = built("zero3+optimizer=disk", disk_path=path.parent)
    step(model, optimizer)
    with pytest.raises(StateError, match=r"which is offloaded to disk .*use sw.save, which reads it as it is written"):
        sw.start_save(path, model, optimizer)
    assert not path.exists()
    sw.save(path, model, optimizer)
    step(model, optimizer)


def test_what_rests_on_disk_is_not_copied_to_the_host(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, save_from_disk, tmp_path / "here")
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("strategy", ["zero3_offload", "ddp+optimizer=host:0.5"])
def test_what_rests_on_the_host_is_saved_both_ways(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    run_ranks(2, save_both_ways, tmp_path, strategy, False)
    assert digests(tmp_path / "now") == digests(tmp_path / "beside")
