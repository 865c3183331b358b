"""What units ask for, from sizes alone."""

import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.bench.measure import count_calls
from shardwise.planner.shapes.names import NAMED, PUBLISHED
from shardwise.planner.shapes.shape import ModelShape, parts_in, units_of
from shardwise.planner.training import Lora, Loss, Training
from shardwise.planner.work.activations import LOSS, block_works, works_of

LLAMA_3 = ModelShape(
    name="8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, code="in-tree"
)
LLAMA_2 = ModelShape(
    name="7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000, code="hf"
)
MIXTRAL = replace(LLAMA_2, name="mixtral", kv_heads=8, ffn=14336, num_experts=8, num_active_experts=2)
GPT = ModelShape(
    name="gpt2", layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, tied=True,
    gated=False, bias=True, qkv_bias=True, norm="layer", num_positions=1024,
)  # fmt: skip


def widths(shape: ModelShape, training: Training) -> float:
    """What a block saves, in hidden states of 16 bits."""
    block = list(works_of(shape, training).values())[3]
    return block.saved_bytes / (2 * shape.hidden * training.num_tokens)


def test_no_torch_is_imported() -> None:
    code = "import sys, shardwise.planner.work.activations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shape", [LLAMA_3, LLAMA_2, MIXTRAL, GPT, replace(LLAMA_3, layers=1)], ids=lambda s: s.name)
@pytest.mark.parametrize("lora", [None, Lora()])
def test_every_unit_has_its_work_and_nothing_else_does(shape: ModelShape, lora: Lora | None) -> None:
    names = {unit.name for unit in units_of(shape, lora)}
    works = works_of(shape, Training(lora=lora))
    assert set(works) - {LOSS} == names
    assert [work.kind for work in works.values()].count("loss") == 1
    assert list(works.values())[-1].kind == "loss"


def test_large_chunks_need_more_memory_and_move_less() -> None:
    """Three tensors of 2048 instead of 512 tokens, in 4, 4 and 2 bytes; the gradient of the head's weight in fp32."""
    asked = Training(micro_batch=2, seq=4096, compile=True)
    small, large = (works_of(LLAMA_3, replace(asked, loss_chunk=chunk))["head"] for chunk in ("small", "large"))
    assert large.forward_peak_bytes - small.forward_peak_bytes == pytest.approx(10 * 1536 * 128256, rel=0.05)
    assert [sum(product.count for product in each.products) for each in (small, large)] == [16, 4]


def test_full_checkpointing_saves_the_input_alone() -> None:
    assert widths(LLAMA_3, Training(checkpointing="full")) == 1.0
    assert widths(GPT, Training(checkpointing="full")) == 1.0


def test_what_torchtitan_keeps_is_what_its_tracker_shows() -> None:
    """1 full, 7.7 with every second product kept: what the tracker shows for Llama 2 7B."""
    titan = replace(LLAMA_2, code="titan")
    assert widths(titan, Training(engine="fsdp2", checkpointing="full")) == 1.0
    assert widths(titan, Training(engine="fsdp2", checkpointing="selective")) == pytest.approx(7.7, abs=0.01)


def test_a_compiled_block_saves_what_products_and_norms_read() -> None:
    """4 + (1 + 2 kv / heads) + 1 + 3 ffn / hidden, and a few numbers per row."""
    shape = LLAMA_2
    expected = 4 + (1 + 2 * shape.kv_heads / shape.heads) + 1 + 3 * shape.ffn / shape.hidden
    assert widths(shape, Training(compile=True)) == pytest.approx(expected, rel=0.005)
    assert widths(shape, Training(compile=True)) < widths(shape, Training())


def test_plain_cross_entropy_takes_12_bytes_a_logit() -> None:
    """And 14 where the logits themselves are held, too."""
    training = Training(engine="fsdp2", loss="plain", seq=4096)
    shape = replace(LLAMA_2, vocab=10**6)  # so that nothing else counts
    loss = works_of(shape, training)["lm_head"]
    per_logit = (loss.saved_bytes + loss.backward_peak_bytes) / (training.num_tokens * shape.vocab)
    assert per_logit == pytest.approx(12, rel=0.01)


def test_a_compiled_loss_takes_4_bytes_a_logit() -> None:
    training = Training(engine="fsdp2", loss="compiled", seq=4096)
    shape = replace(LLAMA_2, vocab=10**6)
    loss = works_of(shape, training)["lm_head"]
    per_logit = (loss.saved_bytes + loss.backward_peak_bytes) / (training.num_tokens * shape.vocab)
    assert per_logit == pytest.approx(4, abs=0.01 + 2 * shape.hidden / training.num_tokens)


@pytest.mark.parametrize(("loss", "least", "most"), [("chunked", 0.5, 0.7), ("fused", 0.0, 0.2), ("plain", 12, 13)])
def test_chunks_hold_the_logits_down(loss: str, least: float, most: float) -> None:
    """In bytes a logit, beside the gradients that are made early."""
    training = Training(loss=loss, seq=8192)  # type: ignore[arg-type]
    end = works_of(LLAMA_3, training)["head"]
    held = end.saved_bytes if loss != "plain" else 0
    logits = training.num_tokens * LLAMA_3.vocab
    peak = max(end.forward_peak_bytes, end.saved_bytes + end.backward_peak_bytes if loss == "plain" else 0)
    assert least <= (peak - held) / logits <= most


def test_work_grows_with_the_tokens() -> None:
    one, four = (works_of(LLAMA_3, Training(micro_batch=size))["blocks.1"] for size in (1, 4))
    assert four.saved_bytes == pytest.approx(4 * one.saved_bytes, rel=1e-4)
    assert four.flops == 4 * one.flops


def test_flops_are_twice_the_weights_and_half_the_scores() -> None:
    training = Training(seq=2048)
    work = works_of(LLAMA_3, training)["blocks.1"]
    block = next(unit for unit in units_of(LLAMA_3) if unit.name == "blocks.1")
    multiplying = sum(param.num_elems for param in block.params if len(param.shape) > 1)
    assert sum(product.flops for product in work.products) == 2 * 2048 * multiplying
    assert work.attention_flops == 2 * 2 * LLAMA_3.hidden * 2048 * 2048 / 2


def test_experts_multiply_by_those_that_are_chosen() -> None:
    work = works_of(MIXTRAL, Training())["model.layers.1"]
    multiplying = MIXTRAL.num_matmul_params - MIXTRAL.vocab * MIXTRAL.hidden
    expected = 2 * 2048 * multiplying / MIXTRAL.layers
    assert sum(product.flops for product in work.products) == pytest.approx(expected, rel=0.001)


def test_all_units_of_a_large_model_in_few_calls() -> None:
    shape = replace(LLAMA_3, name="70b", layers=80, hidden=8192, heads=64, ffn=28672)
    assert sum(count_calls(lambda: works_of(shape, Training(seq=4097))).values()) < 12_000


@pytest.mark.parametrize("tied", [True, False])
def test_many_positions_are_a_unit_of_their_own(tied: bool) -> None:
    shape = replace(GPT, num_positions=8192, tied=tied)
    works = works_of(shape, Training(micro_batch=2))
    assert {unit.name for unit in units_of(shape)} <= set(works)
    # The same for both sequences.
    assert 2 * works["transformer.wpe"].output_bytes == works["root" if tied else "transformer.wte"].output_bytes


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_chunks_of_the_loss_are_not_counted_one_by_one(loss: Loss) -> None:
    seq = 10**8
    end = works_of(LLAMA_3, Training(seq=seq, loss=loss))["head"]
    assert len(end.products) <= 3
    assert sum(product.flops for product in end.products) == 2 * seq * LLAMA_3.hidden * LLAMA_3.vocab


# Of gpt-oss, the biases of experts have no gradients here: 0.03 % of a block.
@pytest.mark.parametrize("shape", [*PUBLISHED.values(), NAMED["mpt-7b"], replace(PUBLISHED["qwen3-8b"], code="titan")])
def test_a_backward_has_a_gradient_for_every_parameter_of_its_block(shape: ModelShape) -> None:
    for kind in set(shape.kinds):
        block = parts_in(shape).blocks[shape.kinds.index(kind)][1]
        grad_bytes = block_works(kind, Training(engine="fsdp2", seq=128))[1].grad_bytes
        assert grad_bytes == pytest.approx(2 * block.num_elems, rel=4e-4 if shape.has_sinks else 0, abs=15_360)
