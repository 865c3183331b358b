"""The tapes, held against torch's own autograd on the meta device: byte for byte."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.titan import Block as TitanBlock
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.training import Checkpointing, Lora, Training
from shardwise.planner.work.activations import LOSS, works_of
from shardwise.planner.work.blocks import titan_block
from shardwise.planner.work.probe import StandIns, measure_call, probe_works
from shardwise.planner.work.tape import Habits, measure
from shardwise.planner.work.work import Work
from shardwise.trainer.checkpointing import _checkpointed, checkpoint_blocks
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.lora import adapters_for, with_adapters
from shardwise.trainer.settings import Lora as LoraSettings
from shardwise.trainer.shapes import TransformerShape

BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "output_bytes", "grad_bytes")


def in_tree(**sizes: Any) -> tuple[torch.nn.Module, ModelShape]:
    sizes = {"vocab": 32000, "hidden": 512, "layers": 3, "heads": 8, "kv_heads": 8, "ffn": 1536, **sizes}
    with torch.device("meta"):
        model = Transformer(TransformerShape(max_seq=4096, **sizes))
    return model, ModelShape(name="x", code="in-tree", head_dim=sizes["hidden"] // sizes["heads"], **sizes)


def hugging_face(family: str) -> tuple[torch.nn.Module, ModelShape]:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    llama = {**common, "num_key_value_heads": 2, "intermediate_size": 1536}
    shape = ModelShape(
        name="x", layers=3, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1536, vocab=32000, code="hf"
    )
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=3)
        shape = ModelShape(
            name="x", layers=3, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, tied=True,
            gated=False, bias=True, qkv_bias=True, norm="layer", num_positions=1024,
        )  # fmt: skip
    elif family == "qwen3":
        config = transformers.Qwen3Config(head_dim=96, tie_word_embeddings=False, **llama)
        shape = replace(shape, head_dim=96, qk_norm=True)
    elif family == "qwen2":
        config = transformers.Qwen2Config(tie_word_embeddings=True, **llama)
        shape = replace(shape, qkv_bias=True, tied=True)
    else:
        config = transformers.LlamaConfig(**llama)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).train(), shape


def checkpointed(mode: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_checkpointed, forward, mode)


def both(
    made: tuple[torch.nn.Module, ModelShape], batch: int, seq: int, **training: Any
) -> tuple[dict[str, Work], dict[str, Work]]:
    model, shape = made
    asked = Training(micro_batch=batch, seq=seq, **training)
    mode = asked.checkpointing
    around: Callable[[Any], Any] | None = (
        None if mode == "none" else lambda forward: partial(_checkpointed, forward, mode)
    )
    probed = probe_works(model, asked, around=around)
    return works_of(shape, asked), probed


def differences(planned: dict[str, Work], probed: dict[str, Work], names: tuple[str, ...] = BYTES) -> list[str]:
    return [
        f"{unit} {name}: planned {getattr(planned[unit], name)}, probed {getattr(work, name)}"
        for unit, work in probed.items()
        for name in names
        if getattr(planned[unit], name) != getattr(work, name) and not (unit == "embed" and name.startswith("backward"))
    ]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_in_tree_tape_is_torch_to_the_byte(kv_heads: int, checkpointing: str) -> None:
    planned, probed = both(in_tree(kv_heads=kv_heads), 2, 384, checkpointing=checkpointing)
    assert list(planned) == list(probed)
    assert not differences(planned, probed)
    for unit, work in probed.items():
        assert planned[unit].products == work.products
        assert planned[unit].attention_flops == work.attention_flops
        assert planned[unit].recomputed == pytest.approx(work.recomputed)
        assert planned[unit].num_kernels == work.num_kernels
        assert planned[unit].moved_bytes == pytest.approx(work.moved_bytes, rel=0.03)
        # Where a norm is replaced, the probe does not see that its backward reads the gradient, and both once more.
        assert planned[unit].backward_moved_bytes == pytest.approx(work.backward_moved_bytes, rel=0.08)


@pytest.mark.parametrize(
    "sizes", [{"heads": 4, "kv_heads": 4, "ffn": 2048}, {"hidden": 1024, "heads": 16, "kv_heads": 4}]
)
def test_other_sizes_too(sizes: dict[str, int]) -> None:
    """The exception that stops a recompute may keep its last input alive a little longer than the tape thinks."""
    planned, probed = both(in_tree(**sizes), 1, 1000, checkpointing="selective")
    assert not differences(planned, probed, tuple(name for name in BYTES if name != "backward_peak_bytes"))
    for unit, work in probed.items():
        if unit != "embed":
            assert planned[unit].backward_peak_bytes == pytest.approx(work.backward_peak_bytes, rel=0.1)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_in_fp32_without_grouped_queries_a_kernel_is_used_and_with_them_none_is(kv_heads: int) -> None:
    assert not differences(*both(in_tree(kv_heads=kv_heads), 1, 256, precision="fp32"))


def test_a_tied_head_is_in_the_root_and_the_loss_comes_last() -> None:
    planned, probed = both(in_tree(tied=True), 2, 256)
    assert list(planned) == list(probed) == ["root", "blocks.0", "blocks.1", "blocks.2", LOSS]
    assert not differences(planned, probed, ("saved_bytes", "forward_peak_bytes", "output_bytes"))
    assert planned[LOSS].kind == "loss"


@pytest.mark.quick("llama-*", "qwen3-full", "gpt2-selective")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_blocks_of_transformers_are_torch_to_the_byte(family: str, checkpointing: str) -> None:
    planned, probed = both(hugging_face(family), 2, 256, checkpointing=checkpointing)
    assert set(planned) == set(probed)
    blocks = {unit: work for unit, work in probed.items() if unit.rpartition(".")[2].isdigit()}
    assert len(blocks) == 3
    assert not differences(planned, blocks)
    end = list(probed)[-1]
    for name in BYTES:
        assert getattr(planned[end], name) == pytest.approx(getattr(probed[end], name), rel=0.005)


def test_experts_are_planned_in_every_dtype() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    works = {}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        works[dtype] = probe_works(model, Training(micro_batch=2, seq=64, precision=precision, loss="plain"))[
            "model.layers.0"
        ]
    bf16, fp32, fp16 = works.values()
    assert bf16.flops == fp32.flops == fp16.flops
    assert fp16.saved_bytes == bf16.saved_bytes
    assert 1.7 < fp32.saved_bytes / bf16.saved_bytes < 2  # bf16 keeps casts of its norms beside


def test_adapters_save_what_they_read_and_frozen_layers_nothing() -> None:
    model, shape = in_tree(kv_heads=2)
    adapted = with_adapters(model, adapters_for(LoraSettings(r=16), model), 1, torch.device("cpu"))
    planned, probed = both((adapted, shape), 2, 256, lora=Lora(r=16))
    assert set(planned) == set(probed)
    blocks = {unit: work for unit, work in probed.items() if unit.rpartition(".")[2].isdigit()}
    assert not differences(planned, blocks)
    # No gradient goes back beyond the first block.
    works = list(blocks.values())
    assert works[0].saved_bytes < works[1].saved_bytes == works[2].saved_bytes
    full, _ = both(in_tree(kv_heads=2), 2, 256)
    assert works[1].saved_bytes < full["blocks.1"].saved_bytes


def test_a_probe_leaves_the_model_alone_and_is_quick() -> None:
    model, _ = in_tree(layers=32)
    before = {name: (id(param), param.dtype) for name, param in model.named_parameters()}
    works = probe_works(model, Training(seq=128))
    assert len(works) == 3 + 32
    assert before == {name: (id(param), param.dtype) for name, param in model.named_parameters()}
    assert all(param.grad is None for param in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("has_norms", [False, True])  # its Llama and its Qwen3
def test_torchtitans_block_is_like_its_code(has_norms: bool) -> None:
    with torch.device("meta"):
        block = TitanBlock(512, 8, 2, 1536, has_norms).to(torch.bfloat16)
    x = torch.empty(2, 256, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
    # The plan leaves out the casts of cosines and sines, 0.2 % of what a block keeps.
    width, dtype = (128, torch.bfloat16) if has_norms else (32, torch.complex64)
    turns = torch.empty(256, width, dtype=dtype, device="meta")
    probed = measure_call(block.forward, None, (x, turns), {}, list(block.parameters()), StandIns(frozenset()))
    shape = ModelShape(name="x", layers=3, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1536, vocab=1)
    shape = replace(shape, qk_norm=has_norms)
    habits = Habits(writes_directly=False, batch=2, seq=256)
    planned = measure(partial(titan_block, shape), x.numel(), 2, habits)
    assert not differences({"block": planned}, {"block": probed})


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_module_has_its_checkpointing_itself(checkpointing: Checkpointing) -> None:
    module, shape = in_tree()
    checkpoint_blocks(module, checkpointing)
    probed = probe_works(module, Training(micro_batch=2, seq=384))
    planned = works_of(shape, Training(micro_batch=2, seq=384, checkpointing=checkpointing))
    assert not differences(planned, probed)
    assert probed["blocks.0"].recomputed > 0
