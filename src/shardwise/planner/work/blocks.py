"""Blocks of transformers as tapes, each written like the code that it stands for.

The in-tree block (trainer/model.py); Llama's of transformers, which Mistral, Qwen, Gemma and Mixtral follow; GPT-2's;
and the blocks of published measurements: torchtitan's Llama and llm-foundry's MPT. A compiled block is the same code
with its elementwise chains fused: their intermediate results are recomputed instead of saved.
"""

from dataclasses import replace
from functools import partial

from .operations import (
    Setting,
    activation,
    add,
    attention,
    cast,
    dropout,
    gated,
    gelu_tanh,
    layer_norm,
    linear,
    llama_norm,
    llama_rotate,
    multiply,
    rms_norm,
    rotate,
    scale,
    softmax,
)
from .tape import Buffers, Tape, Tensor


def in_tree_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    hidden = at.shape.hidden
    x = add(t, x, _in_tree_attention(at, t, rms_norm(t, x, hidden)))
    return add(t, x, gated_ffn(at, t, rms_norm(t, x, hidden), ("gate", "up", "down")))


def _in_tree_attention(at: Setting, t: Tape, x: Tensor) -> Tensor:
    shape = at.shape
    query = rotate(t, linear(t, x, (shape.hidden, shape.query_width), "query"))
    key = rotate(t, linear(t, x, (shape.hidden, shape.kv_width), "key"))
    value = linear(t, x, (shape.hidden, shape.kv_width), "value")
    mixed = attention(t, at.attention, query, key, value)
    if at.attention.kernel != "efficient":
        # The result of attention is stored head by head, like the queries, and is copied to be stored token by token.
        flat = t.op([mixed], mixed.num_elems, passes=[True])
        return linear(t, flat, (shape.query_width, shape.hidden), "out")
    return linear(t, mixed, (shape.query_width, shape.hidden), "out")


def gated_ffn(at: Setting, t: Tape, x: Tensor, names: tuple[str, str, str]) -> Tensor:
    hidden, ffn, bias = at.shape.hidden, at.shape.ffn, at.shape.bias
    gate, up, down = names
    fan = hidden, ffn
    if t.habits.is_fused:
        mixed = gated(t, linear(t, x, fan, gate, bias), linear(t, x, fan, up, bias))
    else:
        mixed = multiply(t, activation(t, linear(t, x, fan, gate, bias)), linear(t, x, fan, up, bias))
    return linear(t, mixed, (ffn, hidden), down, bias)


def llama_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """transformers' block: variables hold the residuals; of four norms (Gemma), two come after attention and ffn."""
    shape = at.shape
    norm = partial(layer_norm, bias=shape.norm_bias) if shape.norm == "layer" else llama_norm
    residual = x
    x = norm(t, x, shape.hidden)
    x = _llama_attention(at, t, x)
    if shape.num_norms > 2:
        x = norm(t, x, shape.hidden)
    x = add(t, residual, x)
    residual = x
    x = norm(t, x, shape.hidden)
    x = _llama_ffn(at, t, x)
    if shape.num_norms > 2:
        x = norm(t, x, shape.hidden)
    return add(t, residual, x)


def _llama_attention(at: Setting, t: Tape, x: Tensor) -> Tensor:
    shape, bias = at.shape, at.shape.qkv_bias
    query = linear(t, x, (shape.hidden, shape.query_width), "q_proj", bias)
    if shape.qk_norm:
        query = llama_norm(t, query, shape.head_dim)
    key = linear(t, x, (shape.hidden, shape.kv_width), "k_proj", bias)
    if shape.qk_norm:
        key = llama_norm(t, key, shape.head_dim)
    value = linear(t, x, (shape.hidden, shape.kv_width), "v_proj", bias)
    query, key = llama_rotate(t, query), llama_rotate(t, key)
    mixed = attention(t, at.attention, query, key, value)
    return linear(t, mixed, (shape.query_width, shape.hidden), "o_proj", shape.bias)


def _llama_ffn(at: Setting, t: Tape, x: Tensor) -> Tensor:
    shape = at.shape
    if shape.num_experts > 1:
        return _experts(at, t, x)
    if shape.gated:
        return gated_ffn(at, t, x, ("gate_proj", "up_proj", "down_proj"))
    mixed = activation(t, linear(t, x, (shape.hidden, shape.ffn), "up_proj", shape.bias))
    return linear(t, mixed, (shape.ffn, shape.hidden), "down_proj", shape.bias)


def _experts(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """Copy tokens to their experts, each token `num_active_experts` times.

    The number of tokens per expert depends on the data: here all get the same. Autograd makes the experts' gradients.
    """
    shape = at.shape
    num_tokens, ffn = x.num_elems // shape.hidden, shape.ffn_of_expert
    num_sent = num_tokens * shape.num_active_experts
    scores = softmax(t, cast(t, linear(t, x, (shape.hidden, shape.num_experts), "gate"), 4))
    chosen = cast(t, t.view(scores, num_sent), at.itemsize)
    sent = t.op([x], num_sent * shape.hidden)
    weights = shape.num_experts
    both = linear(t, sent, (shape.hidden, 2 * ffn if shape.gated else ffn), "experts", plain=False, num_weights=weights)
    if shape.gated:
        gate, up = t.split(both, 2)
        mixed = gated(t, gate, up) if t.habits.is_fused else multiply(t, activation(t, gate), up)
        del gate, up
    else:
        mixed = activation(t, both)
    out = linear(t, mixed, (ffn, shape.hidden), "experts", plain=False, num_weights=weights)
    weighted = t.op([out, chosen], out.num_elems, saves=[out, chosen], buffers=Buffers(scratch_bytes=out.num_bytes))
    del out, both, mixed, sent
    return t.op([weighted], x.num_elems)


def gpt_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """GPT-2's block: its projections are not torch's linear layers, and its dropout is on by default."""
    hidden = at.shape.hidden
    residual = x
    x = layer_norm(t, x, hidden)
    mixed = _gpt_attention(at, t, x)
    x = add(t, mixed, residual)
    residual = x
    x = layer_norm(t, x, hidden)
    return add(t, residual, _gpt_ffn(at, t, x))


def _gpt_attention(at: Setting, t: Tape, x: Tensor) -> Tensor:
    shape = at.shape
    sizes = shape.query_width, shape.kv_width, shape.kv_width
    num_rows = x.num_elems // shape.hidden
    query, key, value = t.split_at(
        linear(t, x, (shape.hidden, sum(sizes)), "c_attn", shape.qkv_bias, plain=False),
        [num_rows * size for size in sizes],
    )
    mixed = attention(t, at.attention, query, key, value)
    mixed = linear(t, mixed, (shape.query_width, shape.hidden), "c_proj", shape.bias, plain=False)
    return dropout(t, mixed)


def _gpt_ffn(at: Setting, t: Tape, x: Tensor) -> Tensor:
    shape = at.shape
    x = linear(t, x, (shape.hidden, shape.ffn), "c_fc", shape.bias, plain=False)
    x = gelu_tanh(t, x)
    x = linear(t, x, (shape.ffn, shape.hidden), "c_proj", shape.bias, plain=False)
    return dropout(t, x)


def titan_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """torchtitan's Llama: rotary positions as complex numbers in fp32, keys and values repeated for every head."""
    shape = at.shape
    width, kv_width = (shape.hidden, shape.query_width), (shape.hidden, shape.kv_width)
    normed = llama_norm(t, x, shape.hidden)
    query, key, value = (linear(t, normed, fan) for fan in (width, kv_width, kv_width))
    del normed
    query, key = _complex_rotated(t, query), _complex_rotated(t, key)
    if shape.heads != shape.kv_heads:
        key, value = (t.op([part], query.num_elems) for part in (key, value))
    mixed = attention(t, replace(at.attention, kv_heads=shape.heads), query, key, value)
    del query, key, value
    x = add(t, x, linear(t, mixed, (shape.query_width, shape.hidden)))
    del mixed
    return add(t, x, gated_ffn(at, t, llama_norm(t, x, shape.hidden), ("w1", "w3", "w2")))


def _complex_rotated(t: Tape, x: Tensor) -> Tensor:
    return scale(t, x) if t.habits.is_fused else cast(t, scale(t, cast(t, x, 4)), x.itemsize)


def mpt_block(at: Setting, t: Tape, x: Tensor) -> Tensor:
    """llm-foundry's block, with 16-bit layer norms and flash attention; one product makes queries, keys and values."""
    shape = at.shape
    num_rows = x.num_elems // shape.hidden
    normed = layer_norm(t, x, shape.hidden, bias=shape.norm_bias)
    fused = linear(t, normed, (shape.hidden, shape.query_width + 2 * shape.kv_width), bias=shape.qkv_bias)
    parts = t.split_at(fused, [num_rows * shape.query_width, *[num_rows * shape.kv_width] * 2])
    del normed, fused
    mixed = attention(t, at.attention, *parts)
    del parts
    x = add(t, x, linear(t, mixed, (shape.query_width, shape.hidden), bias=shape.bias))
    del mixed
    wide = linear(t, layer_norm(t, x, shape.hidden, bias=shape.norm_bias), (shape.hidden, shape.ffn))
    return add(t, x, linear(t, activation(t, wide), (shape.ffn, shape.hidden), bias=shape.bias))
