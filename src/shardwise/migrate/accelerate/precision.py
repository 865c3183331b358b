"""`mixed_precision`: what computes, and what gradients are summed in, under DDP and under FSDP.

DDP computes under autocast from fp32 weights, and sums fp32 gradients. FSDP casts parameters and gradients alike, so
it sums in 16 bits: there `reduce_dtype` says so. Masters are fp32 in all of them.
"""

from typing import Any

from ..account import Block

PRECISIONS = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def precision_settings(word: str, is_fsdp: bool) -> dict[str, Any]:
    """For the word of Accelerate; Hugging Face's flags are turned into it."""
    settings: dict[str, Any] = {"precision": PRECISIONS[word]}
    if is_fsdp and word == "bf16":
        settings["reduce_dtype"] = "bf16"
    return settings


def told(word: str, is_fsdp: bool) -> str:
    if PRECISIONS[word] == "fp32":
        return "precision fp32"
    if not is_fsdp:
        return f"precision {word}: fp32 masters, fp32 gradients; all of a block computes in {word}, without autocast"
    if word == "bf16":
        return "precision bf16 with reduce_dtype bf16: fp32 masters, gradients are summed in bf16, as FSDP does"
    return "precision fp16: fp32 masters, and gradients are summed in fp32, where FSDP would sum in fp16"


def read_mixed_precision(top: Block, is_fsdp: bool, why_no_fp8: str) -> dict[str, Any]:
    """`fp16: true` is what older files say."""
    before = top.flag("fp16")
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "fp16" if before else "no")
    if top.has("mixed_precision"):
        top.ignored("fp16", "mixed_precision says it")
    else:
        top.used("fp16", told(word, is_fsdp))
    if word == "fp8":
        top.refused("mixed_precision", why_no_fp8)
        word = "bf16"
    top.used("mixed_precision", told(word, is_fsdp))
    return precision_settings(word, is_fsdp)
