"""Blocks that published measurements are about, as tapes: torchtitan's Llama, llm-foundry's MPT."""

from dataclasses import replace

from .attentions import attention
from .blocks import gated_ffn
from .operations import Habits, activation, add, cast, layer_norm, linear, llama_norm, scale
from .setting import Setting
from .storages import Tensor
from .tape import Tape


def titan_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """torchtitan's Llama: rotary positions as complex numbers in fp32, keys and values repeated for every head."""
    h, shape = at.habits, at.shape
    width, kv_width = (shape.hidden, shape.query_width), (shape.hidden, shape.kv_width)
    normed = llama_norm(t, h, x, shape.hidden)
    query, key, value = (linear(t, h, normed, fan) for fan in (width, kv_width, kv_width))
    del normed
    query, key = _complex_rotated(t, h, query), _complex_rotated(t, h, key)
    if shape.heads != shape.kv_heads:
        key, value = (t.op([part], query.num_elems) for part in (key, value))
    mixed = attention(t, replace(at.attention, kv_heads=shape.heads), query, key, value)
    del query, key, value
    x = add(t, x, linear(t, h, mixed, (shape.query_width, shape.hidden)))
    del mixed
    return add(t, x, gated_ffn(at, t, llama_norm(t, h, x, shape.hidden), ("w1", "w3", "w2")))


def _complex_rotated(t: Tape, h: Habits, x: Tensor) -> Tensor:
    return scale(t, x) if h.is_fused else cast(t, scale(t, cast(t, x, 4)), x.itemsize)


def mpt_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """llm-foundry's, with layer norms in 16 bits and flash attention; queries, keys and values from one product."""
    h, shape = at.habits, at.shape
    num_rows = x.num_elems // shape.hidden
    normed = layer_norm(t, h, x, shape.hidden, bias=shape.norm_bias)
    fused = linear(t, h, normed, (shape.hidden, shape.query_width + 2 * shape.kv_width), bias=shape.qkv_bias)
    parts = t.split_at(fused, [num_rows * shape.query_width, *[num_rows * shape.kv_width] * 2])
    del normed, fused
    mixed = attention(t, at.attention, *parts)
    del parts
    x = add(t, x, linear(t, h, mixed, (shape.query_width, shape.hidden), bias=shape.bias))
    del mixed
    wide = linear(t, h, layer_norm(t, h, x, shape.hidden, bias=shape.norm_bias), (shape.hidden, shape.ffn))
    return add(t, x, linear(t, h, activation(t, wide), (shape.ffn, shape.hidden), bias=shape.bias))
