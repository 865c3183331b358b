"""Generated texts: those of transformers, and the same on every rank and from every form in which a run has left its
model."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.folder import step_folder
from shardwise.core.engine.guards import engine_of
from shardwise.trainer.data.tokenizer import tokenizer_for
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export
from shardwise.trainer.models.generation import Answer, Prompt, Sampling, generate, samples
from shardwise.trainer.models.headloss import LossPath, set_path
from shardwise.trainer.models.restore import find_model_in, find_restorable, settings_of
from shardwise.trainer.settings import Lora, Settings
from shardwise.trainer.shapes import TransformerShape
from tests.checkpoint.by_hand import save_by_hand
from tests.harness import Pool
from tests.trainer.models.architectures import COMMON, CONFIGS, VOCAB, saved

CPU = torch.device("cpu")
BYTES = tokenizer_for("bytes")
SHAPE = TransformerShape(vocab=300, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=16)


class Scripted(nn.Module):
    """Prefers, after token t, token t + 1; the vocabulary is larger than the tokenizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.rows: list[Tensor] = []
        set_path(self, LossPath("in-tree", isolates=True))

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        self.rows.append(tokens)
        logits = torch.zeros(*tokens.shape, 300)
        logits.scatter_(-1, (tokens[..., None] + 1) % 300, 5.0)
        logits[..., 299] = 9.0  # nobody's token
        return logits


def said_after(model: nn.Module, prompt: str, sampling: Sampling, *, max_seq: int) -> str:
    [text] = samples(model, BYTES, [prompt], sampling, max_seq=max_seq)
    return text


def test_the_likeliest_token_follows_until_the_model_is_full() -> None:
    model = Scripted().train()
    greedy = Sampling(temperature=0, max_new_tokens=6)
    assert said_after(model, "ab", greedy, max_seq=9) == "cdefgh"
    assert model.training
    assert said_after(model, "ab", greedy, max_seq=4) == "cd"
    assert said_after(model, "abcdef", greedy, max_seq=4) == "g", "it sees the end of a prompt that is too long"


def answers(model: nn.Module, prompts: Sequence[str | Sequence[int]], batch_size: int, **how: Any) -> list[Answer]:
    """The answers to prompts, in their order."""
    texts = [BYTES.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    asked = [Prompt(ids, frozenset([256]), number) for number, ids in enumerate(texts)]
    sampling = Sampling(**{"temperature": 0, **how})
    return sorted(generate(model, BYTES, asked, sampling, max_seq=32, batch_size=batch_size))


def test_rows_that_end_leave_their_place_to_the_next_prompt() -> None:
    model = Scripted()
    given = ["a", "\xfa", "m", "\xfb", "xy"]  # bytes of the second and the fourth lead to the end token soon
    found = answers(model, [list(text.encode("latin-1")) for text in given], 2, max_new_tokens=8, stop=("op", "fg"))
    assert [(row.text, row.end) for row in found[::2]] == [
        ("bcde", "stop"),
        ("n", "stop"),
        ("z{|}~\x7f\ufffd\ufffd", "length"),
    ]
    assert [(row.num_tokens, row.end) for row in found[1::2]] == [(5, "stop"), (4, "stop")]
    assert max(len(row) for row in model.rows) == 2
    assert found == answers(
        model, [list(text.encode("latin-1")) for text in given], 5, max_new_tokens=8, stop=("op", "fg")
    )


def test_a_document_may_end_and_an_empty_prompt_begins_one() -> None:
    model = Transformer(SHAPE)
    set_path(model, LossPath("in-tree", isolates=True))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model.embed.weight[:, 0] = model.norm.weight[0] = 1.0
        model.head.weight[BYTES.end_id, 0] = 1.0
    assert said_after(model, "", Sampling(temperature=0), max_seq=8) == "", "the end comes at once"


def test_the_seed_decides() -> None:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    set_path(model, LossPath("in-tree", isolates=True))

    def text(seed: int, **changes: Any) -> str:
        sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "seed": seed, "max_new_tokens": 6, **changes})
        return said_after(model, "The", sampling, max_seq=16)

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_k=1) == text(3, temperature=0) == text(4, top_p=1e-6)
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"stop": ("",)}):
        with pytest.raises(sw.ConfigurationError):
            text(1, **wrong)


def test_only_the_likeliest_tokens_are_drawn() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**how: Any) -> set[int]:
        return {Sampling(temperature=1.0, **how).choose(logits, generator) for _ in range(200)}

    assert drawn(top_k=0) == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_k=0, top_p=0.69) == {1, 3}
    assert drawn(top_k=0, top_p=0.71) == {1, 2, 3}
    assert drawn(top_k=3, top_p=0.8) == {1, 2, 3}, "of the three, two have 0.78 of the probability"


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(SHAPE, max_seq=32))
    set_path(model, LossPath("in-tree", isolates=True))
    how = {"temperature": 1.0, "max_new_tokens": 9, "seed": 5}
    prompts = ["The", "A long prompt", "x", "The", "def f"]
    alone = answers(model, prompts, 1, **how)
    assert alone == answers(model, prompts, 3, **how) == answers(model, prompts, 5, **how)
    assert alone[0].text != alone[3].text


def numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


# Every token of the models here is one of this tokenizer's; texts are lists of their numbers.
NUMBERS = dataclasses.replace(BYTES, vocab_size=VOCAB, end_id=0, decode=numbers)
ASKED = torch.randint(1, VOCAB, (6, 12), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [ids[:length] for ids, length in zip(ASKED, (5, 1, 9, 3, 12, 7), strict=True)]


def save_random(name: str, folder: Path) -> None:
    """Save a model with random weights. None are tied: such models would repeat the last token for ever."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(**COMMON, head_dim=8, sliding_window=6) if name == "mistral" else CONFIGS[name]()
    config.tie_word_embeddings = False
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def greedy_as_transformers(names: Sequence[str], folder: Path, where: str, num_tokens: int = 20) -> None:
    from transformers import AutoModelForCausalLM

    sw.init()
    for name in names:
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder / name)
        place = folder if "disk" in where else None
        model = find_model_in(folder / name, "bytes").load("fp32", strategy=where, disk_path=place)
        asked = [Prompt(ids, frozenset([0]), number) for number, ids in enumerate(PROMPTS)]
        sampling = Sampling(temperature=0, max_new_tokens=num_tokens)
        found = sorted(generate(model, NUMBERS, asked, sampling, max_seq=64, batch_size=4))
        words = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": 0, "pad_token_id": 0}
        for ids, answer in zip(PROMPTS, found, strict=True):
            expected = theirs.generate(torch.tensor([ids]), use_cache=True, **words)[0].tolist()[len(ids) :]
            expected = expected[: expected.index(0)] if 0 in expected else expected
            assert answer.text.split() == numbers(expected).split(), (name, answer.number)
        assert len(set(" ".join(row.text for row in found).split())) > 8, (name, "one token again and again")


def test_greedy_tokens_are_those_of_transformers(run_ranks: Pool, tmp_path: Path) -> None:
    names = ["llama", "qwen3", "gemma2", "gpt2", "opt", "mistral", "qwen3_moe", "deepseek_v3"]
    for name in names:
        save_random(name, tmp_path)
    run_ranks(1, greedy_as_transformers, names, tmp_path, "ddp")


@pytest.mark.slow
def test_a_model_with_a_recurrent_state_computes_the_whole_text(run_ranks: Pool, tmp_path: Path) -> None:
    save_random("mamba", tmp_path)
    run_ranks(1, greedy_as_transformers, ["mamba"], tmp_path, "ddp", 6)


@pytest.mark.parametrize(
    "where",
    ["zero3+params=host+optimizer=host", pytest.param("zero3+params=disk+optimizer=host", marks=pytest.mark.slow)],
)
def test_greedy_tokens_with_weights_off_the_device(where: str, run_ranks: Pool, tmp_path: Path) -> None:
    save_random("gemma2", tmp_path)
    run_ranks(2, greedy_as_transformers, ["gemma2"], tmp_path, where)


def only_slots(folder: Path) -> tuple[int, int, int, int]:
    saved("llama", folder, dtype=torch.bfloat16)
    sw.init()
    model = find_model_in(folder, "bytes").load("fp32", strategy="zero3+params=host+optimizer=host")
    held, schedule = sw.memory(model), engine_of(model).schedule
    num_elems = sum(flat.num_elems for unit in schedule.units for flat in unit.flats)
    return held.params + held.optimizer + held.grads, held.buffers - sum(schedule.slot_bytes), held.host, num_elems


def test_a_model_on_the_host_has_slots_on_the_device_and_one_copy_on_the_host(run_ranks: Pool, tmp_path: Path) -> None:
    [(on_device, others, on_host, num_elems)] = run_ranks(1, only_slots, tmp_path)
    assert on_device == 0
    assert others < 20_000, "embedding and head do not share a slot with blocks"
    assert 4 * num_elems <= on_host < 4 * num_elems + 10 * 4096


def moved(run: Path) -> Path:
    """A checkpoint of the run that lies elsewhere now."""
    return run.with_name(f"{run.name}-moved")


def left_behind(settings: Settings, run: Path) -> str:
    """A run folder as a run leaves it; what its model says."""
    sw.init()
    built = build(settings, 257, CPU)
    model, _ = sw.shard(built.model, None, "zero3", precision="bf16", seed=settings.seed)
    if built.weights is not None:
        sw.load_full_state_dict(model, built.weights)
    sw.save(step_folder(run / "checkpoints", 10), model)
    sw.save(moved(run), model, extra={"configuration": json.loads(settings.to_json())})
    export(model, built, settings, run / "export")
    (run / "config.json").write_text(settings.to_json())
    return said(model, built.facts.max_seq)


def said(model: Any, max_seq: int) -> str:
    return said_after(model, "It was", Sampling(temperature=0, max_new_tokens=12), max_seq=max_seq)


def restored(path: Path) -> str:
    found = find_model_in(path)
    assert found.tokenizer.name == "bytes"
    return said(found.load(strategy="zero3"), found.facts.max_seq)


def all_ways(cases: list[tuple[Settings, Path]]) -> list[list[str]]:
    texts = []
    for settings, run in cases:
        said_then = left_behind(settings, run)
        places = (run, run / "export", step_folder(run / "checkpoints", 10), moved(run))
        texts.append([said_then, *map(restored, places)])
    return texts


def test_runs_exports_and_checkpoints_say_the_same(run_ranks: Pool, tmp_path: Path) -> None:
    saved("llama", tmp_path / "llama")
    shape: dict[str, int | bool] = {"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "vocab": 300}
    settings = [
        Settings(model="tiny", shape=shape, precision="bf16", seed=3),
        Settings(model="tiny", shape=shape, lora=Lora(r=4), seed=3),
        Settings(model=str(tmp_path / "llama"), tokenizer="bytes"),
        Settings(model=str(tmp_path / "llama"), tokenizer="bytes", lora=Lora(r=4)),
    ]
    cases = [(each, tmp_path / f"run-{index}") for index, each in enumerate(settings)]
    first, second = run_ranks(2, all_ways, cases)
    assert first == second
    for texts in first:
        # In 16 bits a run may choose otherwise; what it has left is read in 32.
        assert len(set(texts[1:])) == 1
        assert texts[1]


def test_what_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.ConfigurationError, match="there is no such folder"):
        find_restorable(tmp_path / "none")
    with pytest.raises(sw.ConfigurationError, match="nor a complete checkpoint, nor a run folder"):
        find_restorable(tmp_path)


def test_which_model_a_checkpoint_belongs_to(tmp_path: Path) -> None:
    settings = Settings(model="tiny", seed=7)
    place = tmp_path / "run" / "checkpoints" / "step-000001"
    (tmp_path / "run").mkdir()
    assert settings_of(place, {}) is None
    assert settings_of(place, {"configuration": json.loads(settings.to_json())}) == settings
    with pytest.raises(sw.ConfigurationError, match=r"'configuration' of .*step-000001 does not hold the settings"):
        settings_of(place, {"configuration": [1]})
    (tmp_path / "run" / "config.json").write_text(settings.to_json())
    assert settings_of(place, {"configuration": [1]}) == settings
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(sw.ConfigurationError, match=r"config.json does not hold the settings of a run"):
        settings_of(place, {})
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    assert settings_of(place, {}) is None


def nobody_says(place: Path) -> None:
    with pytest.raises(sw.ConfigurationError, match=r"its model is unknown.*shardwise export"):
        find_model_in(place)


def test_a_checkpoint_of_no_run_is_told_how_it_can_be_continued(run_ranks: Pool, tmp_path: Path) -> None:
    save_by_hand(tmp_path / "other", {"a": torch.ones(2)})
    run_ranks(1, nobody_says, tmp_path / "other")
