"""A rank that runs out of memory says where, what lay there, what was planned, and what would help.

Ranks on CPUs never raise what GPUs raise, so it is raised for them, at a place of the test's choice; all else is real.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.optim.sharded_optimizer import ShardedOptimizer
from shardwise.trainer import metrics
from shardwise.trainer.loss import _ChunkedCrossEntropy
from shardwise.trainer.model import Block
from shardwise.trainer.out_of_memory import AllocatorPool, cause_of, is_out_of_memory
from shardwise.trainer.run import run_rank
from shardwise.trainer.settings import Settings
from tests.cli.asking import Asker
from tests.harness import Pool
from tests.support.running import settings_for

MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79 GiB"
SHAPE = {"hidden": 256, "layers": 3, "heads": 2, "kv_heads": 1, "ffn": 2048, "max_seq": 512}


def starved(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(MESSAGE)


def in_forward(block: Block, x: Tensor, *others: Any) -> Tensor:
    if x.is_meta or not torch.is_grad_enabled():
        return FORWARD(block, x, *others)
    return starved()


class _Starving(torch.autograd.Function):
    """Between two blocks; its backward is the first thing after that of the later one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return starved()


def in_backward(block: Block, x: Tensor, *others: Any) -> Tensor:
    y = FORWARD(block, x, *others)
    return y if x.is_meta else _Starving.apply(y)  # type: ignore[no-untyped-call]


FORWARD = Block.forward
# Where it is raised, and what that is called.
PLACES: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "forward": (Block, "forward", in_forward, "forward blocks.0"),
    "backward": (Block, "forward", in_backward, "backward blocks.2"),
    "loss": (_ChunkedCrossEntropy, "forward", staticmethod(starved), "forward loss"),
    "norm": (ShardedOptimizer, "_norm", starved, "the gradients' norm"),
    "update": (ShardedOptimizer, "_update", starved, "update"),
    "set-up": (metrics.Metrics, "__init__", starved, "the set-up"),
}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asker:
    return Asker(monkeypatch, capsys)


@contextmanager
def starving(place: str) -> Iterator[None]:
    owner, name, instead, _ = PLACES[place]
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, instead)
    try:
        yield
    finally:
        patch.undo()


def run_starving(place: str, settings: Settings) -> int:
    """On every rank."""
    with starving(place):
        return run_rank(settings.to_json())


def small(folder: Path, **changes: Any) -> Settings:
    return settings_for(folder, shape=SHAPE, seq_length=256, precision="bf16", **changes)


@pytest.mark.quick("backward", "update", "set-up")
@pytest.mark.parametrize("place", PLACES)
def test_the_instant_is_named_and_every_rank_leaves_a_report(run_ranks: Pool, tmp_path: Path, place: str) -> None:
    settings = small(tmp_path, strategy="zero2")
    assert run_ranks(2, run_starving, place, settings) == [3, 3]
    for rank in range(2):
        report = json.loads((tmp_path / f"oom-rank{rank}.json").read_text())
        assert (report["rank"], report["instant"]) == (rank, PLACES[place][3])
        assert report["asked_bytes"] == 3 << 29
        assert report["planned"]["optimizer"] > 0
        assert ("activations" in report["planned"]) == (place != "set-up")
        if place != "set-up":
            assert report["step"] == 1
            assert report["seen"]["params"] == report["planned"]["params"]
        assert any(fix["words"] == "--gradient-checkpointing full" for fix in report["fixes"])


def test_it_is_told_in_words_and_again_by_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Asker
) -> None:
    assert run_starving("backward", small(tmp_path, strategy="ddp")) == 3
    said = capsys.readouterr().err
    assert said.startswith("shardwise: does not fit: CUDA out of memory, 1.61 GB more were asked for\n")
    assert "rank 0, the backward of blocks.2, step 1; planned at most" in said
    for words in ("predicted ", "measured ", "largest ", "to blame    activations: ", "x the time"):
        assert words in said
    assert max(len(line) for line in said.splitlines()) <= 100
    answer = ask("doctor", "oom", tmp_path)
    assert answer.code == 0
    assert said.removeprefix("shardwise: ").strip() in answer.out
    found = json.loads(ask("doctor", "oom", tmp_path, "--json").out)
    assert [report["rank"] for report in found] == [0]


def test_a_start_that_goes_well_forgets_the_report(tmp_path: Path, ask: Asker) -> None:
    assert run_starving("set-up", small(tmp_path, strategy="ddp")) == 3
    assert ask("doctor", "oom", tmp_path).code == 0
    assert run_rank(small(tmp_path, strategy="ddp", max_steps=1).to_json()) == 0
    answer = ask("doctor", "oom", tmp_path)
    assert answer.code == 2
    assert answer.err == f"shardwise: {tmp_path}: no rank of its last start ran out of memory\n"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "it is no run folder: it has no config.json"),
        ({"oom-rank0.json": "{"}, "oom-rank0.json is no report of a rank"),
        ({"oom-rank0.json": "[]"}, "oom-rank0.json is no report of a rank"),
        ({"oom-rank0.json": "[" * 100_000}, "oom-rank0.json is no report of a rank"),
        ({"oom-rank0.json": '{"time": 1e300, "rank": 0, "text": ""}'}, "the time 1e+300 in a rank's report is none"),
    ],
)
def test_doctor_refuses_in_one_sentence(tmp_path: Path, ask: Asker, made: dict[str, str], words: str) -> None:
    for name, content in made.items():
        (tmp_path / name).write_text(content)
    answer = ask("doctor", "oom", tmp_path)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err
    assert ask("doctor", "oom", tmp_path / "nowhere").code == 2


@pytest.mark.slow
def test_another_rank_than_the_first_is_heard_of(tmp_path: Path) -> None:
    """Through the launcher: only rank 1 fails, whose words go to its log."""
    words = [f"shape={json.dumps(SHAPE)}", "seq_length=64", "global_batch_size=4", "max_steps=4", 'strategy="zero1"']
    command = [sys.executable, "-m", "tests.support.launching", "starve", str(tmp_path), *words]
    seen = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert seen.returncode == 3, seen.stderr
    assert "rank 1, the forward of blocks.0, step 2" in seen.stderr
    assert [file.name for file in tmp_path.glob("oom-*")] == ["oom-rank1.json"]


def test_what_other_libraries_call_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(MESSAGE))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not is_out_of_memory(RuntimeError("the size of tensor a (3) must match the size of tensor b (4)"))


def test_fragmentation_is_blamed_where_enough_was_reserved() -> None:
    pool = AllocatorPool(allocated=50 * 10**9, reserved=75 * 10**9, limit=80 * 10**9, grows=False)
    assert cause_of(None, {}, pool, 10**10, None).startswith("fragmentation: 25.0 GB are reserved and unused")
    assert cause_of(None, {"params": 3, "activations": 5}, pool, 3 * 10**10, None).startswith("activations: 5 B of 8 B")
    assert cause_of(None, {"params": 5, "activations": 3}, pool, 3 * 10**10, None).startswith("the state: ")
