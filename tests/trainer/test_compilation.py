"""`--compile auto`: a pure decision from planned times, the same on every rank and after a resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.api.sharding import chosen_plan
from shardwise.base.errors import ConfigurationError
from shardwise.core import mesh
from shardwise.core.layout import layouts_for
from shardwise.core.schedule.units import find_units
from shardwise.planner.assess import Assessor
from shardwise.planner.planning import machine_of
from shardwise.planner.training import Training
from shardwise.planner.work.work import Work
from shardwise.trainer import compilation, run_folder, run_plan
from shardwise.trainer.checks import check_all, completed
from shardwise.trainer.compilation import COMPILE_S, Compilation, Gain, decide, gain_of, known_blocks
from shardwise.trainer.models.build import build
from shardwise.trainer.models.headloss import LossPath
from shardwise.trainer.optimizers import optimizer_for
from shardwise.trainer.out_of_memory import FailureContext
from shardwise.trainer.run import run_rank, set_up
from shardwise.trainer.run_folder import choose
from shardwise.trainer.run_plan import Draft, _with_best_chunk, draft
from shardwise.trainer.run_state import Run
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.support.running import settings_for, train

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "dtype": "bfloat16"},
}


def test_compilation_pays_if_it_saves_more_than_it_takes() -> None:
    gain = Gain(eager_s=1.0, compiled_s=0.875)
    first = int(COMPILE_S / 0.125)
    assert not decide(gain, first).is_on
    assert decide(gain, first + 1).is_on
    assert not decide(replace(gain, num_kinds=2), first + 1).is_on
    assert not decide(Gain(1.0, 1.1), 10**6).is_on
    assert not decide("there are no blocks", 10**6).is_on


def test_the_decision_says_why() -> None:
    assert str(decide(Gain(1.0, 0.875), 6720)) == "on, saves about 14 min of 1 h 52 min"
    assert str(decide(Gain(1.0, 0.875), 20)) == "off, the run is 20 steps: it would take about 15 s and save 2 s"
    assert str(decide("triton is not installed", 20)) == "off, triton is not installed"
    assert str(Compilation(True)) == "on"


def drafted(folder: Path, name: str, num_steps: int, gpu: str = "NVIDIA H200", **changes: Any) -> Draft:
    """Draft the plan of a Llama on one GPU. Nothing is allocated."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, **SIZES[name]}))
    (folder / "text.txt").write_text("some text\n" * 100)
    settings = Settings(
        model=str(folder / "config.json"),
        random_weights=True,
        train_file=(str(folder / "text.txt"),),
        seq_length=4096,
        **{"precision": "bf16", **changes},
    )
    settings = completed(settings, has_gpu=False)
    checked = check_all(settings, 1)
    built = build(settings, checked.tokenizer.vocab_size, torch.device("cpu"), facts=checked.facts)
    return draft(built, settings, checked, optimizer_for(built.model, settings), None, num_steps, gpu)


@pytest.mark.parametrize(
    ("name", "micro", "num_micro", "lora", "compiles", "measured_gb"),
    [
        ("1b", 4, 2, None, "off", None),
        ("1b", 4, 2, None, "on", 44.3),
        ("8b", 2, 2, Lora(r=16, targets=LINEAR), "on", 54.8),
    ],
)  # fmt: skip
def test_compiled_blocks_are_planned_as_measured_on_an_h200(
    tmp_path: Path, name: str, micro: int, num_micro: int, lora: Lora | None, compiles: Any, measured_gb: float | None
) -> None:
    found = drafted(
        tmp_path, name, 1, lora=lora, compile=compiles, per_device_train_batch_size=micro,
        gradient_accumulation_steps=num_micro, strategy="ddp",
    )  # fmt: skip
    assert found.training.compile == (compiles == "on")
    planned = peak_gb(found)
    if measured_gb is not None:
        assert planned == pytest.approx(measured_gb, rel=0.02)
    else:
        assert planned > 45


def test_large_chunks_are_taken_where_they_are_free_or_pay(tmp_path: Path) -> None:
    """Free: the peak is in the backward. They pay if each chunk adds to the gradient of a large weight."""
    trained = drafted(tmp_path, "1b", 1, compile="on", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    lora = drafted(
        tmp_path, "8b", 1, compile="on", per_device_train_batch_size=2, lora=Lora(r=16, targets=LINEAR)
    )  # fmt: skip
    for found, free_gb, expected in ((trained, 141, "large"), (trained, 30, "small"), (lora, 141, "small")):
        assess = Assessor(found.subject, replace(machine_of("1xH200"), free_bytes=free_gb * 10**9))
        entry = assess("ddp", layouts_for("ddp", assess.unit_names), found.training)
        chosen = _with_best_chunk(entry, assess)
        assert chosen.training.loss_chunk == expected
        assert chosen.memory.peak.total <= entry.memory.peak.total + 2.1e9


def test_large_chunks_are_refused_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "path_of", lambda _: LossPath("plain", isolates=True))
    with pytest.raises(ConfigurationError, match="loss_chunk large"):
        drafted(tmp_path, "1b", 1, loss_chunk="large")


def peak_gb(found: Draft) -> float:
    assess = Assessor(found.subject, machine_of("1xH200"))
    return assess("ddp", layouts_for("ddp", assess.unit_names), found.training).memory.peak.total / 1e9


@pytest.fixture
def has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "find_spec", lambda _: object())


@pytest.mark.usefixtures("has_triton")
def test_auto_compiles_long_runs_on_gpus(tmp_path: Path) -> None:
    short, long = (drafted(tmp_path, "1b", num_steps, per_device_train_batch_size=4) for num_steps in (20, 20_000))
    assert short.compilation.why.startswith("the run is 20 steps: ")
    assert (short.compilation.is_on, short.training.compile) == (False, False)
    assert (long.compilation.is_on, long.training.compile) == (True, True)
    assert drafted(tmp_path, "1b", 20_000, gpu="", per_device_train_batch_size=4).compilation.setting == "off"
    assert drafted(tmp_path, "1b", 20_000, compile="off", per_device_train_batch_size=4).compilation.setting == "off"


@pytest.mark.usefixtures("has_triton")
def test_adapters_make_the_first_block_another_kind(tmp_path: Path) -> None:
    settings = Settings(model="tiny", lora=Lora(r=4))
    built = build(settings, 257, torch.device("cpu"))
    known = known_blocks(built, find_units(built.model))
    assert known is not None
    assert known.lora is not None
    assert known.lora.targets == ("query", "value")
    works = {"": known.works(Training())[1]}
    gain = gain_of(built.model, known, lambda _: works, Training(), "NVIDIA H200")
    assert isinstance(gain, Gain)
    assert gain.num_kinds == 2


@pytest.mark.usefixtures("has_triton")
def test_auto_is_off_where_the_gain_is_not_known(tmp_path: Path) -> None:
    works = {"": Work(0, 0, 0, 0)}
    plain = nn.Sequential(nn.Linear(3, 3))
    assert gain_of(plain, None, lambda _: works, Training(), "NVIDIA H200") == "the model has no repeated blocks"
    built = build(Settings(model="tiny"), 257, torch.device("cpu"))
    units = find_units(built.model, 10**9)
    assert known_blocks(built, units) is None, "the blocks are not units of their own"
    assert "not known" in str(gain_of(built.model, None, lambda _: works, Training(), "NVIDIA H200"))


def test_a_model_without_blocks_cannot_be_compiled(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, compile="on", strategy="ddp")
    settings = replace(settings, shape={**settings.shape, "layers": 1})
    with pytest.raises(ConfigurationError, match=r"compile on: model .* has no repeated blocks"):
        run_rank_raising(settings)


def test_auto_chooses_a_strategy_for_compiled_blocks(tmp_path: Path) -> None:
    run = run_rank_raising(settings_for(tmp_path, compile="on", precision="bf16"))
    chosen = chosen_plan(run.model)
    assert chosen is not None
    assert chosen.recommended is not None
    assert chosen.training.compile
    assert run.planned.entry.training.compile
    assert chosen.recommended.works == run.planned.entry.works


def run_rank_raising(settings: Settings) -> Run:
    was_joined = mesh.is_joined()
    try:
        mesh.init(device="cpu")
        return set_up(completed(settings, has_gpu=False), FailureContext())
    finally:
        if not was_joined:
            mesh.leave()


def test_ranks_agree_and_a_resumed_run_keeps_the_decision(
    run_ranks: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(tmp_path, max_steps=2, save_steps=2)
    assert settings.compile == "auto"
    assert train(run_ranks, 2, settings) == 0
    assert json.loads((tmp_path / "config.json").read_text())["compile"] == "off"
    resumed = choose(replace(settings, resume_from_checkpoint="auto", max_steps=3))
    assert resumed.compile == "off"
    assert choose(replace(settings, resume_from_checkpoint="auto", compile="on")).compile == "on"
    assert run_rank(replace(settings, resume_from_checkpoint="auto", max_steps=3).to_json()) == 0
    assert " compile off " in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("saved", "chunk"), [({"compile": "on"}, "small"), ({"compile": "on", "loss_chunk": "large"}, "large")]
)
def test_a_resumed_run_keeps_its_chunks_and_an_old_one_has_small_ones(
    saved: dict[str, str], chunk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_choice", lambda *_: (tmp_path, tmp_path / "checkpoint"))
    monkeypatch.setattr(run_folder, "_config_in", lambda _: ("index.json", json.dumps(saved)))
    resumed = choose(Settings())
    assert (resumed.compile, resumed.loss_chunk) == ("on", chunk)
    assert choose(Settings(loss_chunk="small")).loss_chunk == "small"


def test_a_bool_is_refused_outside_of_files() -> None:
    with pytest.raises(ConfigurationError, match="compile: unknown True"):
        Settings(compile=True)  # type: ignore[arg-type]
