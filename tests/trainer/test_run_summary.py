"""What a run says first and last, to the letter: it is what users see."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.api.memory_report import Memory
from shardwise.base.text import WIDTH, count, duration, plural, size
from shardwise.core.schedule.state_bytes import StateBytes
from shardwise.trainer import run_summary
from shardwise.trainer.compilation import Compilation
from shardwise.trainer.loop import Ending
from shardwise.trainer.metrics import Evaluations
from shardwise.trainer.run_checkpoints import Saves
from shardwise.trainer.run_state import Run
from shardwise.trainer.settings import Batching, Settings
from shardwise.trainer.signals import TERMINATED
from shardwise.version import VERSION


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


STATE = StateBytes(6_849_380, 6_849_380, 13_698_760)
MEMORY = Memory(
    params=STATE.params,
    grads=STATE.grads,
    optimizer=STATE.optimizer,
    buffers=1_234,
    activations=None,
    peak_grads=STATE.grads,
    peak_buffers=1_234,
    peak_activations=None,
    now=512_000_000,
    peak=512_000_000,
    reserved=None,
    host=0,
    disk=0,
    planned=STATE,
    planned_buffers=0,
    planned_host=0,
    planned_disk=0,
)
NOTE = "no plan of activations: it cannot be tried out"
SETTINGS = Settings(precision="fp32", learning_rate=3e-3, warmup_steps=10)


def plan(activation_bytes: int | None = None, **changes: Any) -> SimpleNamespace:
    note = NOTE if activation_bytes is None else ""
    peak = SimpleNamespace(peak=SimpleNamespace(name="backward blocks.3"))
    facts = {"why": "", "why_batch": "", "note": note, "activation_bytes": activation_bytes, "peak_bytes": None}
    facts["compilation"] = Compilation(False, "on CPUs it takes longer than it saves")
    return SimpleNamespace(**{**facts, "entry": SimpleNamespace(name="ddp", memory=peak), **changes})


def engine(layout: str = "ddp", optimizer_on: str = "device", **host: Any) -> SimpleNamespace:
    units = [SimpleNamespace(layout=SimpleNamespace(name=layout, optimizer_on=optimizer_on))]
    arena = SimpleNamespace(is_pinned=host.get("is_pinned"))
    disk = SimpleNamespace(folder=host["disk"]) if "disk" in host else None
    return SimpleNamespace(
        schedule=SimpleNamespace(units=units),
        mesh=SimpleNamespace(node_size=host.get("node_size", 2)),
        host=SimpleNamespace(arena=arena, disk=disk, spare_bytes=0),
    )


class StandIn(SimpleNamespace):
    """A run with the facts that its texts are made of."""

    num_samples_before = Run.num_samples_before
    batching = Run.batching
    is_first, prompt, rank = True, "The ", 0
    first_step, first_sample = 0, 0

    def memory_row(self) -> None:
        self.peak_memory = self.held


START = StandIn(
    folder=Path("runs/tiny"),
    settings=SETTINGS,
    checked=SimpleNamespace(batching=Batching(2, 1, 8), seq_length=128, tokenizer=SimpleNamespace(name="")),
    built=SimpleNamespace(num_params=1_712_345, num_trainable=1_712_345),
    samples=SimpleNamespace(num_tokens=465_321, num_samples=3_561, padding=0.0),
    eval_samples=SimpleNamespace(num_samples=74),
    model=engine(),
    optimizer=None,
    device=torch.device("cpu"),
    hosts=None,
    num_steps=200,
    updates_early=False,
    planned=plan(),
    saves=Saves(20_100_000, in_background=False),
    save_s=None,
    free_bytes=6_590_000_000,
    free_host_bytes=0,
    records=SimpleNamespace(first_loss=5.54711, last_loss=2.1034, tokens_per_step=2048, tokens_per_s=9752.4, mfu=None),
    saved_step=200,
    evaluations=Evaluations(SETTINGS, step=200, value=2.1512, last_step=200),
    eval_loss=2.1512,
    exported="runs/tiny/export",
    generated="value of the object.\nThe end",
    held=MEMORY,
)
END = Ending(200)


def started(**changes: Any) -> Any:
    return StandIn(**{**vars(START), **changes})


def checked(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(START.checked), **changes})


def settings(**changes: Any) -> Settings:
    return replace(SETTINGS, **changes)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_summary, "engine_of", lambda model: model)
    monkeypatch.setattr(run_summary, "device_name", lambda device: "NVIDIA H200" if device.type == "cuda" else "cpu")
    monkeypatch.setattr(run_summary, "num_cores", lambda: 8)
    monkeypatch.setattr(run_summary, "exchange", lambda hosts, mine: [mine])
    monkeypatch.setattr(run_summary, "unigram_entropy", lambda samples: 3.0921)


def banner(run: Any) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_summary, "memory", lambda model, optimizer: run.held)
        patched.setattr(run_summary, "expected_save_s", lambda *_: run.save_s)
        return run_summary.banner(run)


def summary(run: Any, ending: Ending = END) -> str:
    return run_summary.summary(run, ending, 42.1)


def test_banner() -> None:
    assert (
        banner(START)
        == f"""\
shardwise {VERSION}  runs/tiny

  model       tiny, 1.71M parameters, all trained
  strategy    auto -> ddp on 2 ranks, cpu, fp32
  batch       16 samples = 2 ranks x 1 micro-batch x 8, 2,048 tokens a step
  data        Python's manual, 465k tokens, 3,561 samples of 128, 74 more for evaluation
  training    200 steps = 0.899 epochs, adamw, lr 0.003 (cosine, 10 warm-up steps)
  compile     off, on CPUs it takes longer than it saves
  memory      27.4 MB + activations a rank, of 6.59 GB free: params 6.85 MB, grads 6.85 MB,
              optimizer 13.7 MB; no plan of activations: it cannot be tried out
  checkpoint  at the end, 20.1 MB"""
    )


def test_banner_with_a_planned_peak_and_why_it_was_chosen() -> None:
    planned = started(planned=plan(36_400_000, why="the fastest that fits, 0.2 s a step"))
    text = " ".join(banner(planned).split())
    assert "auto -> ddp on 2 ranks, cpu, fp32: the fastest that fits, 0.2 s a step batch" in text
    assert (
        "memory planned peak 63.8 MB a rank, of 6.59 GB free: params 6.85 MB, grads 6.85 MB, optimizer 13.7 MB, "
        "activations 36.4 MB at the backward of blocks.3 checkpoint"
    ) in text


def test_the_summary_sets_the_planned_peak_beside_the_seen_one() -> None:
    held = replace(MEMORY, peak_activations=35_000_000)
    planned = started(planned=plan(36_400_000, peak_bytes=63_800_000), held=held)
    rows = [line.split() for line in summary(planned).splitlines()]
    assert ["memory", "params", "grads", "optimizer", "buffers", "activations", "peak"] in rows
    seen = next(row for row in rows if row[:1] == ["predicted"])
    assert seen[-4:] == ["36.4", "MB", "63.8", "MB"]


def test_a_process_is_not_set_beside_a_planned_peak() -> None:
    planned = started(planned=plan(36_400_000, peak_bytes=63_800_000))
    lines = summary(planned).splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("  memory"))
    assert lines[at].split()[-3:] == ["activations", "peak", "process"]
    assert lines[at + 1].split()[-5:] == ["36.4", "MB", "63.8", "MB", "-"]
    assert lines[at + 2].split()[-4:] == ["-", "-", "512", "MB"]


def test_banner_of_a_large_run() -> None:
    large = started(
        built=SimpleNamespace(num_params=8_030_000_000, num_trainable=41_943_040),
        settings=settings(strategy="zero3", save_steps=500, resume_from_checkpoint="runs/my " + "x" * 120),
        model=engine("zero3", node_size=8),
        device=torch.device("cuda"),
        checked=checked(batching=Batching(64, 4, 1), tokenizer=SimpleNamespace(name="models/llama")),
        num_steps=2000,
        held=replace(MEMORY, planned_buffers=1_234_567_890),
        free_bytes=139_000_000_000,
        saves=Saves(96_000_000_000, in_background=False),
        save_s=23.4,
        first_step=1000,
    )
    lines = banner(large).splitlines()
    assert "  model       tiny, 8.03B parameters, 41.9M trained (0.52%)" in lines
    assert "  strategy    zero3 on 64 ranks = 8 nodes x 8, NVIDIA H200, fp32" in lines
    assert "  batch       256 samples = 64 ranks x 4 micro-batches x 1, 32,768 tokens a step" in lines
    assert "  memory      1.26 GB + activations a rank, of 139 GB free: params 6.85 MB, grads 6.85 MB," in lines
    assert f"              optimizer 13.7 MB, buffers 1.23 GB; {NOTE}" in lines
    assert "  checkpoint  every 500 steps, 96.0 GB, about 23.4 s each" in lines
    assert "              tokenizer models/llama" in lines
    assert any("from step 1,000 on" in line for line in lines)
    # A path stays whole; nothing else is longer than a line.
    assert [line.strip() for line in lines if len(line) > WIDTH] == [f"resumes     runs/my {'x' * 120}"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "about 0.1 s"), (0.1, "about 0.1 s"), (23.4, "about 23.4 s"), (725, "about 12:05")],
)
def test_time_of_a_checkpoint(seconds: float, text: str) -> None:
    shown = banner(started(save_s=seconds))
    assert shown.endswith(f"checkpoint  at the end, 20.1 MB, {text} each")


def test_saves_in_the_background_are_told() -> None:
    shown = banner(started(settings=settings(save_steps=10), saves=Saves(20_100_000, in_background=True)))
    assert shown.endswith("every 10 steps, 20.1 MB, in the background from a copy of 10.1 MB a rank on the host")


def test_what_rests_on_host_and_disk_is_told() -> None:
    there = started(
        held=replace(MEMORY, planned_host=96_000_000_000, planned_disk=48_000_000_000),
        free_host_bytes=230_000_000_000,
        model=engine(optimizer_on="host", is_pinned=True, disk="/nvme/state"),
        device=torch.device("cuda"),
        settings=settings(strategy="zero3", offload=("params=host", "optimizer=host")),
    )
    lines = banner(there).splitlines()
    assert "  strategy    zero3 with params=host,optimizer=host -> ddp on 2 ranks, NVIDIA H200, fp32" in lines
    assert "  host        96.0 GB a rank, pinned, of 230 GB free; updates by 8 cores a rank" in lines
    assert "  disk        48.0 GB a rank in /nvme/state, gone when the run ends" in lines
    there.model.host.spare_bytes = 27_000_000_000
    assert "free; included: 27.0 GB for updates before the norm is known; updates" in " ".join(banner(there).split())
    there.model.host.spare_bytes = 0
    there.model.host.arena.is_pinned, there.updates_early = False, True
    pageable = " ".join(banner(there).split())
    assert "96.0 GB a rank, not pinned, of 230 GB free; updates by 8 cores a rank inside the backward, so" in pageable
    activations = started(held=replace(MEMORY, planned_host=5_000_000), free_host_bytes=10_000_000)
    assert "  host        5.00 MB a rank, of 10.0 MB free" in banner(activations).splitlines()
    assert "host" not in banner(START)


def test_why_a_save_is_not_in_the_background_is_told() -> None:
    shown = " ".join(
        banner(started(settings=settings(save_steps=10), saves=Saves(20_100_000, False, "it is on disk"))).split()
    )
    assert shown.endswith("checkpoint every 10 steps, 20.1 MB, not in the background: it is on disk")


def test_the_summary_has_host_and_disk() -> None:
    there = started(
        held=replace(MEMORY, planned_host=96_000_000, host=95_000_000, planned_disk=48_000_000, disk=48_000_000)
    )
    rows = [line.split() for line in summary(there).splitlines()]
    assert next(row for row in rows if row[:1] == ["memory"])[-2:] == ["host", "disk"]
    assert next(row for row in rows if row[:1] == ["predicted"])[-4:] == ["96.0", "MB", "48.0", "MB"]
    assert next(row for row in rows if row[:1] == ["measured"])[-4:] == ["95.0", "MB", "48.0", "MB"]


def test_summary() -> None:
    assert (
        summary(START)
        == """\
done: 200 steps of 200, 410k tokens in 0:42

  loss        5.5471 -> 2.1034, evaluation 2.1512 (perplexity 8.60), unigram entropy 3.0921
  speed       9,752 tokens/s
  checkpoint  runs/tiny/checkpoints/step-000200
  export      runs/tiny/export
  memory       params    grads  optimizer  buffers  process
    predicted 6.85 MB  6.85 MB    13.7 MB      0 B        -
    measured  6.85 MB  6.85 MB    13.7 MB  1.23 kB   512 MB

  | The value of the object.
  | The end"""
    )


def test_summary_of_a_run_that_was_stopped() -> None:
    records = SimpleNamespace(**{**vars(START.records), "last_loss": math.nan, "mfu": 0.4213})
    held = replace(MEMORY, peak_activations=7_000_000_000)
    stopped = started(records=records, eval_loss=None, held=held, exported="", generated="")
    lines = summary(stopped, Ending(120, stop=TERMINATED)).splitlines()
    assert lines[0] == "stopped (terminated): step 120 of 200, 246k tokens in 0:42"
    assert not any("loss" in line for line in lines)
    assert "  speed       9,752 tokens/s, MFU 42.1%" in lines
    assert "  memory       params    grads  optimizer  buffers  activations    peak" in lines
    assert "    predicted 6.85 MB  6.85 MB    13.7 MB      0 B            -       -" in lines
    assert "    measured  6.85 MB  6.85 MB    13.7 MB  1.23 kB      7.00 GB  512 MB" in lines
    assert not any("export" in line for line in lines)


def test_a_sample_can_not_play_with_the_terminal_and_stays_short() -> None:
    wild = summary(started(generated="\x1b[2J\r\x07\u202e" + "word " * 400))
    assert not {"\x1b", "\r", "\x07", "\u202e"} & {*wild}
    assert wild.splitlines()[-1] == "  | ..."
    assert len(wild.splitlines()) < 24
    assert all(len(line) <= WIDTH for line in wild.splitlines())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (123_456, "123 kB"), (999_600, "1.00 MB"),
     (9_996_000, "10.0 MB"), (1.35e9, "1.35 GB"), (2e12, "2.00 TB"), (1.29e16, "12.9 PB"), (4e18, "4,000 PB")],
)  # fmt: skip
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_other_figures() -> None:
    assert [count(number) for number in (12, 1_712_345, 8.03e9)] == ["12", "1.71M", "8.03B"]
    assert [duration(s) for s in (0.2, 59.7, 725, 11_525, 184_325)] == [
        "0:00", "1:00", "12:05", "3:12:05", "2 d 3:12:05"
    ]  # fmt: skip
    assert [plural(1, "rank"), plural(1200, "step"), plural(2, "batch")] == ["1 rank", "1,200 steps", "2 batches"]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_words_stay_whole_on_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = replace(MEMORY, peak_activations=9**9, planned_host=9**9)
    end = started(planned=plan(9**9, peak_bytes=9**9), held=held)
    whole = "\n".join([banner(START), summary(end)])
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = "\n".join([banner(START), summary(end)])
    assert max(len(line) for line in shown.splitlines() if "/" not in line) <= columns
    assert set(shown.split()) == set(whole.split())
    assert shown.count("  predicted ") == (2 if columns == 60 else 1)


def test_the_best_model_and_the_chosen_micro_batch_are_named() -> None:
    wanted = settings(eval_steps=10, load_best_model_at_end=True, early_stopping_patience=2)
    why = "auto: the fastest of 4, 8 that fits, as planned"
    run = started(settings=wanted, planned=plan(36_400_000, why_batch=why))
    text = " ".join(banner(run).split())
    assert f"x 8, 2,048 tokens a step ({why})" in text
    assert "checkpoint at the end and at each new best evaluation" in text
    run.evaluations = Evaluations(wanted, step=80, value=2.05, last_step=100, num_worse=2)
    text = " ".join(summary(run, Ending(100)).split())
    assert text.startswith("stopped early (2 evaluations without a better eval_loss): step 100 of 200")
    assert "best eval_loss 2.0500 at step 80" in text
