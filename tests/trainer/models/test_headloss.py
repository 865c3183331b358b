"""The summed loss: equal to the architectures' own, without logits where that is right, documents kept apart."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.trainer import loss as loss_module
from shardwise.trainer.checkpointing import checkpoint_blocks
from shardwise.trainer.data.samples import Batch
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.build import build
from shardwise.trainer.models.headloss import LossPath, find_path, loss_sum, path_of, set_path
from shardwise.trainer.settings import Lora, Settings
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool
from tests.trainer.models.architectures import CONFIGS, SEQ, VOCAB, batch, documents, saved

CPU = torch.device("cpu")
HOW = {
    "llama": LossPath("chunked", isolates=True),
    "qwen3": LossPath("chunked", isolates=True),
    "gpt2": LossPath("chunked", isolates=True),
    "qwen3_moe": LossPath("chunked", isolates=True),
    "gemma2": LossPath("plain", isolates=True),
    "granite": LossPath("plain", isolates=True),
    "opt": LossPath("chunked", isolates=False),
    "mamba": LossPath("chunked", isolates=False),
}


@pytest.mark.parametrize("name", HOW)
def test_the_path_is_found_by_trying(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.config.use_cache = False
    assert find_path(model) == HOW[name]
    assert "forward" not in model.get_output_embeddings().__dict__


def plain_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_loss_and_gradients_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path).eval()
    given = batch()
    # Hugging Face's own loss: labels are shifted inside, and the mean is taken over those that are left.
    labels = torch.cat((torch.full((2, 1), -100), given.targets[:, :-1]), dim=1)
    whole = Batch(given.tokens[:, :-1], given.targets[:, :-1], None)
    expected = model(input_ids=given.tokens, labels=labels).loss
    num_targets = int((whole.targets != -100).sum())
    expected.backward()
    grads = {key: grad.clone() for key, grad in gradients(model).items()}
    model.zero_grad()
    set_path(model, HOW[name])
    loss = loss_sum(model, whole)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss / num_targets, expected, rtol=1e-5, atol=1e-6)
    (loss / num_targets).backward()
    for key, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_documents_of_a_row_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path).eval()
    set_path(model, HOW[name])
    given = batch(isolated=True)
    alone = sum(plain_sum(model(input_ids=tokens).logits, targets) for tokens, targets in documents(given))
    torch.testing.assert_close(loss_sum(model, given), alone, rtol=1e-5, atol=1e-5)
    assert abs(float((loss_sum(model, batch()) - alone).detach())) > 1e-3


def test_documents_that_cannot_be_kept_apart_are_refused(tmp_path: Path) -> None:
    model = saved("opt", tmp_path)
    set_path(model, HOW["opt"])
    loss_sum(model, batch())
    with pytest.raises(sw.ConfigurationError, match=r"isolate_documents: the attention of opt .*'padded'"):
        loss_sum(model, batch(isolated=True))


SHAPE = TransformerShape(vocab=VOCAB, hidden=24, layers=3, heads=4, kv_heads=2, ffn=40, max_seq=SEQ)


def test_in_tree_documents_do_not_see_each_other() -> None:
    model = Transformer(SHAPE)
    set_path(model, LossPath("in-tree", isolates=True))
    given = batch(isolated=True)
    alone = torch.stack([plain_sum(model(tokens), targets) for tokens, targets in documents(given)]).sum()
    alone.backward()
    grads = {key: grad.clone() for key, grad in gradients(model).items()}
    model.zero_grad()
    loss = loss_sum(model, given)
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
    loss.backward()
    for key, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[key], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss_sum(model, batch()), plain_sum(model(given.tokens), given.targets))
    one = Batch(given.tokens, given.targets, torch.arange(SEQ).repeat(2, 1))
    torch.testing.assert_close(loss_sum(model, one), loss_sum(model, batch()))


def test_without_targets_the_sum_and_its_gradients_are_zero(tmp_path: Path) -> None:
    for name in ("llama", "gemma2"):
        model = saved(name, tmp_path / name)
        set_path(model, HOW[name])
        loss = loss_sum(model, Batch(batch().tokens, torch.full((2, SEQ), -100), None))
        loss.backward()
        assert float(loss.detach()) == 0
        assert not any(grad.any() for grad in gradients(model).values())


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_elems = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_elems = max([self.num_elems, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


def test_logits_never_exist_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "tokens_per_chunk", lambda *_: 4)
    model = saved("llama", tmp_path)
    set_path(model, HOW["llama"])
    with Largest() as seen:
        loss_sum(model, batch()).backward()
    assert seen.num_elems == VOCAB * 16, "the largest tensor is a weight"
    with torch.no_grad(), Largest() as seen:
        loss_sum(model, batch())
    assert seen.num_elems < 2 * SEQ * VOCAB


def test_a_failing_forward_leaves_the_head_as_it_was(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    set_path(model, HOW["llama"])
    with pytest.raises(sw.ConfigurationError, match="do not belong together"):
        loss_sum(model, Batch(batch().tokens, torch.zeros(2, 3, dtype=torch.int64), None))
    assert model(input_ids=batch().tokens).logits.shape == (2, SEQ, VOCAB)


def test_a_model_from_elsewhere_is_refused() -> None:
    with pytest.raises(sw.StateError, match=r"not made by build\(\)"):
        loss_sum(Transformer(SHAPE), batch())


# ---------------------------------------------------------------------------------------------------------
# sharded


def losses(settings: Settings, strategy: str, precision: str, mode: str, compiles: bool) -> list[float]:
    """A few steps on a batch that every rank has; the mean over ranks is what one rank would have."""
    sw.init()
    built = build(settings, 257, CPU)
    model = built.model
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-4)
    paths = checkpoint_blocks(model, mode)  # type: ignore[arg-type]
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision, seed=3)
    if built.weights is not None:
        sw.load_full_state_dict(model, built.weights)
    if compiles:
        for path in paths:
            model.get_submodule(path).compile(backend="aot_eager")
    seen = []
    for step in range(2 if compiles else 3):
        loss = loss_sum(model, batch(isolated=path_of(model).isolates and step == 1, seed=step))
        (loss / (2 * SEQ)).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


def losses_of_all(cases: list[tuple[Any, ...]]) -> list[list[float]]:
    with warnings.catch_warnings():
        # A compiler that looks whether a tensor has a gradient.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return [losses(*case) for case in cases]


@pytest.mark.slow
def test_sharded_checkpointed_compiled_and_adapted_losses_are_the_same(run_ranks: Pool, tmp_path: Path) -> None:
    models = {name: saved(name, tmp_path / name) for name in ("llama", "qwen3", "gemma2")}
    settings = {name: Settings(model=str(tmp_path / name), tokenizer="bytes") for name in models}
    settings["lora"] = replace(settings["llama"], lora=Lora(r=4, targets=("q_proj", "down_proj")))
    settings["in-tree"] = Settings(
        model="tiny", shape={"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "vocab": VOCAB}
    )
    settings["in-tree lora"] = replace(settings["in-tree"], lora=Lora(r=4))
    cases: list[tuple[str, str, str, str, bool]] = [
        *((name, "ddp", "fp32", "none", False) for name in settings),
        *((name, "zero3", "fp32", "none", False) for name in settings),
        ("llama", "zero1", "fp32", "full", False),
        ("lora", "zero2", "fp32", "selective", False),
        ("qwen3", "shard_grad_op", "fp32", "full", True),
        ("llama", "zero3", "bf16", "none", False),
        ("llama", "zero3", "fp16", "none", False),
        ("llama", "zero3", "pure-bf16", "none", False),
    ]
    for seen in run_ranks(2, losses_of_all, [(settings[case[0]], *case[1:]) for case in cases]):
        expected = dict(zip(settings, seen, strict=False))
        for name, model in models.items():
            own = plain_sum(model(input_ids=batch().tokens).logits, batch().targets)
            assert expected[name][0] == pytest.approx(float(own.detach()), rel=1e-5)
        for found, case in zip(seen, cases, strict=True):
            right = expected[case[0]][: len(found)]
            assert found == pytest.approx(right, rel=2e-5 if case[2] == "fp32" else 0.05), case
    assert len({len(set(each)) for each in expected.values()}) == 1
