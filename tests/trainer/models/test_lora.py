"""Adapters of every kind: trained as by peft alone under every strategy, exported for peft, merged, and continued."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export, write_export
from shardwise.trainer.models.headloss import loss_sum
from shardwise.trainer.models.lora import adapters_for
from shardwise.trainer.models.restore import content_of
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.support.strategies import slow_but
from tests.trainer.models.architectures import batch, saved

CPU = torch.device("cpu")
KINDS = {
    "all": ("llama", Lora(r=4, alpha=8, targets=("all-linear",), rslora=True)),
    "dora": ("llama", Lora(r=4, alpha=8, targets=("q_proj", "down_proj"), dora=True)),
    "copies": ("llama", Lora(r=4, alpha=8, targets=("all-linear",), modules_to_save=("embed_tokens", "lm_head"))),
    "tied": ("qwen3", Lora(r=4, alpha=8, targets=("v_proj",), dora=True, modules_to_save=("embed_tokens",))),
    "conv": ("gpt2", Lora(r=4, alpha=8, targets=("all-linear",), dora=True, modules_to_save=("ln_f",))),
}
FAST = [("all", "zero2"), ("copies", "zero1"), ("dora", "zero3"), ("tied", "zero3")]
REST = [(kind, strategy) for kind in KINDS for strategy in ("ddp", "zero1", "zero2", "zero3", "hpz", "zero3-offload")]


def trained(settings: Settings, folder: Path, strategy: str) -> list[float]:
    """The losses of three steps, the last of which is that of the export in the folder."""
    sw.init()
    built = build(settings, 257, CPU)
    optimizer = torch.optim.AdamW([param for param in built.model.parameters() if param.requires_grad], lr=0.02)
    model, optimizer = sw.shard(built.model, optimizer, strategy, precision="fp32", seed=settings.seed)
    sw.load_full_state_dict(model, built.weights)
    seen = []
    for step in range(2):
        loss = loss_sum(model, batch(seed=step))
        (loss / 27).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    if not folder.exists() and settings.lora_from is None:
        export(model, built, settings, folder)
    with torch.no_grad():
        return [*seen, float(loss_sum(model, batch()))]


def trained_all(cases: list[tuple[Settings, Path, str]]) -> list[list[float]]:
    return [trained(*case) for case in cases]


def plain_loss(model: Any, seed: int = 0) -> Any:
    given = batch(seed=seed)
    logits = model(input_ids=given.tokens).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.targets.flatten(), reduction="sum")


def by_peft(settings: Settings, names: dict[str, Any]) -> list[float]:
    """The losses of the same steps by peft alone. Adapters begin as ours."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(settings.model)
    base.config.use_cache = False
    assert settings.lora is not None
    model = get_peft_model(base, adapters_for(settings.lora, base)).train()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_A." in name:
                param.copy_(names[name])
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02)
    seen = []
    for step in range(2):
        loss = plain_loss(model, step)
        (loss / 27).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return [*seen, float(plain_loss(model).detach())]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False", "ignore:.*tied")
@pytest.mark.parametrize("cases", slow_but([FAST], [FAST, REST]), ids=len)
def test_every_kind_trains_as_with_peft_and_is_opened_by_it(
    run_ranks: Pool, tmp_path: Path, cases: list[tuple[str, str]]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = {}
    for kind, (name, lora) in KINDS.items():
        saved(name, tmp_path / name)
        settings[kind] = Settings(model=str(tmp_path / name), tokenizer="bytes", lora=lora)
    kinds = [*dict(cases)]
    found = run_ranks(2, trained_all, [(settings[kind], tmp_path / kind, strategy) for kind, strategy in cases])[0]
    # Training goes on from the adapter.
    later = [(replace(settings[kind], lora_from=str(tmp_path / kind)), tmp_path / kind, "ddp") for kind in kinds]
    again = dict(zip(kinds, run_ranks(2, trained_all, later)[0], strict=True))
    for kind in kinds:
        each = settings[kind]
        right = by_peft(each, dict(build(each, 257, CPU).weights or {}))
        assert right[2] < right[0] - 1
        for case, seen in zip(cases, found, strict=True):
            if case[0] == kind:
                assert seen == pytest.approx(right, rel=2e-5), case
        assert again[kind][0] == pytest.approx(right[2], rel=2e-5), kind

        base: Any = AutoModelForCausalLM.from_pretrained(each.model)
        adapted: Any = PeftModel.from_pretrained(base, tmp_path / kind).eval()
        with torch.no_grad():
            assert float(plain_loss(adapted)) == pytest.approx(right[2], rel=2e-5), kind
            with content_of(tmp_path / kind, is_merged=True) as content:
                write_export(content, tmp_path / "merged" / kind)
            merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / kind)
            assert float(plain_loss(merged)) == pytest.approx(right[2], rel=2e-5), kind
            theirs = adapted.merge_and_unload().state_dict()
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*tied")
@pytest.mark.parametrize("copied", [["lm_head"], ["embed_tokens"]])
def test_an_adapter_that_parts_embedding_and_head_is_not_merged(tmp_path: Path, copied: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    base = saved("qwen3", tmp_path / "base")
    base.config.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=copied))
    adapted.save_pretrained(tmp_path / "adapter")
    with (
        pytest.raises(ConfigurationError, match="cannot be merged"),
        content_of(tmp_path / "adapter", model=str(tmp_path / "base"), is_merged=True) as content,
    ):
        write_export(content, tmp_path / "merged")
