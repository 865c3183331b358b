"""The operations and blocks of transformers on a tape: what each saves and allocates in torch, in eager mode.

Each block is written like the code that it stands for, with `Tape` (tape.py) in place of torch: the in-tree block
(trainer/model.py); transformers' Llama, which Mistral, Qwen, Gemma and Mixtral follow; GPT-2; and, from published
measurements, torchtitan's Llama and llm-foundry's MPT. A compiled block is the same code with its elementwise chains
fused: their intermediate results are recomputed instead of saved.
"""

from collections.abc import Callable
from dataclasses import replace

from ..shapes.shape import ModelShape
from .tape import Kernel, Tape, Tensor, Weight
from .work import ROUND_BYTES, AttentionShape, Product, rounded


def linear(
    tape: Tape, x: Tensor, fan: tuple[int, int], name: str = "", bias: bool = False, *, plain: bool = True,
    num_weights: int = 1,
) -> Tensor:  # fmt: skip
    """Run a linear layer, with its adapter if it has one. `fan`: widths of input and output. Not `plain`: autograd
    allocates the weight's gradient (GPT-2's Conv1D). `num_weights`: experts, each with an equal part of the rows."""
    rank = tape.habits.rank
    out = _product(tape, x, fan, rank == 0, plain, bias, num_weights)
    if not rank or name not in tape.habits.targets:
        return out
    habits, itemsize = tape.habits, x.itemsize
    x = cast(tape, x, 4) if habits.upcasts else x
    narrow = _product(tape, dropout(tape, x) if habits.drops_inputs else x, (fan[0], rank))
    wide = _product(tape, narrow, (rank, fan[1]))
    if not habits.is_fused:  # the number that multiplies counts as saved: a recompute does not stop before this product
        wide = tape.op([wide], saves=[tape.new(0)])
    if wide.itemsize == itemsize:
        return add(tape, out, wide)
    total = tape.op([wide, out], num_passed=1)
    del wide, out
    return cast(tape, total, itemsize)


def _product(
    tape: Tape, x: Tensor, fan: tuple[int, int], trainable: bool = True, plain: bool = True, bias: bool = False,
    num_weights: int = 1,
) -> Tensor:  # fmt: skip
    width, new_width = fan
    rows = x.num_elems // width
    # Whether selective checkpointing saves the result; trainer/checkpointing.py explains our rule.
    is_kept = width < 2 * new_width
    if tape.habits.keeps_every_second or new_width > width:
        tape.num_wide += 1
        is_kept = tape.num_wide % 2 == 1
    weights = [Weight(num_weights * width * new_width, trainable, tape.habits.is_direct and plain)]
    if bias:
        weights.append(Weight(new_width, trainable))
    product = Product(rows // num_weights, new_width, width, num_weights, trainable)
    kernel = Kernel(product=product, is_kept=is_kept)
    return tape.op([x], rows * new_width, saves=[x] if trainable else (), weights=weights, kernel=kernel)


def rms_norm(tape: Tape, x: Tensor, width: int) -> Tensor:
    """torch's own RMS norm, one kernel."""
    kernel = Kernel(extra_bytes=4 * (x.num_elems // width))
    return tape.op([x], saves=[x], weights=[tape.habits.weight(width)], kernel=kernel)


def layer_norm(tape: Tape, x: Tensor, width: int, bias: bool = True) -> Tensor:
    kernel = Kernel(extra_bytes=8 * (x.num_elems // width))
    return tape.op([x], saves=[x], weights=[tape.habits.weight(width)] * (1 + bias), kernel=kernel)


def llama_norm(tape: Tape, x: Tensor, width: int, is_wide: bool = False) -> Tensor:
    """transformers' RMS norm: in fp32, with one kernel for each operation. `is_wide`: so is the product with the weight
    (Gemma, OLMo 2)."""
    if tape.habits.is_fused:
        return rms_norm(tape, x, width)
    wide = 4 * x.num_elems
    states = cast(tape, x, 4)
    squares = tape.op([states], saves=[states], kernel=Kernel(scratch_bytes=2 * wide))
    variance = tape.op([squares], x.num_elems // width)
    del squares
    root = tape.op([scale(tape, variance)], kernel=Kernel(saves_result=True))
    states = tape.op([states, root], saves=[states, root], kernel=Kernel(scratch_bytes=wide))
    states = states if is_wide else cast(tape, states, x.itemsize)
    weight = tape.habits.weight(width)
    kernel = Kernel(scratch_bytes=states.num_bytes * weight.trainable)
    weighted = tape.op([states], saves=[states] if weight.trainable else [], weights=[weight], kernel=kernel)
    return cast(tape, weighted, x.itemsize)


def norm(shape: ModelShape, tape: Tape, x: Tensor, width: int) -> Tensor:
    if shape.norm == "layer":
        return layer_norm(tape, x, width, shape.norm_bias)
    if shape.code == "in-tree":
        return rms_norm(tape, x, width)
    return llama_norm(tape, x, width, is_wide=shape.norm == "rms-fp32")


def cast(tape: Tape, x: Tensor, itemsize: int) -> Tensor:
    return x if x.itemsize == itemsize else tape.op([x], itemsize=itemsize)


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiply by a tensor that needs no gradient; also stands for a negation, and for adding a number."""
    return tape.op([x])


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.op([a, b], num_passed=2)


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.op([a, b], saves=[saved for saved, other in ((a, b), (b, a)) if other.node is not None])


def activation(tape: Tape, x: Tensor) -> Tensor:
    """Apply SiLU or GELU, which save their input."""
    return tape.op([x], saves=[x])


def gated(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Compute activation(gate) * up in one kernel."""
    return tape.op([gate, up], saves=[gate, up])


def gated_halves(tape: Tape, both: Tensor) -> Tensor:
    gate, up = tape.split(both, (1, 1))
    return gated(tape, gate, up) if tape.habits.is_fused else multiply(tape, activation(tape, gate), up)


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """Apply softmax. Its backward on a GPU begins with a product of the gradient and the result."""
    return tape.op([x], kernel=Kernel(saves_result=True, scratch_bytes=x.num_bytes))


def dropout(tape: Tape, x: Tensor) -> Tensor:
    """Apply dropout, which saves a mask of one byte per element. Compiled code generates the mask again instead."""
    return tape.op([x], kernel=Kernel(extra_bytes=0 if tape.habits.is_fused else x.num_elems))


def gelu_tanh(tape: Tape, x: Tensor) -> Tensor:
    """GPT-2's GELU in transformers, written out: x / 2 * (1 + tanh(c * (x + d * x ** 3)))."""
    if tape.habits.is_fused:
        return activation(tape, x)
    half = scale(tape, x)
    cube = tape.op([x], saves=[x], kernel=Kernel(scratch_bytes=2 * x.num_bytes))
    # Each intermediate result is freed once the next exists.
    part = scale(tape, cube)
    del cube
    part = add(tape, x, part)
    part = scale(tape, part)
    part = tape.op([part], kernel=Kernel(saves_result=True))
    part = tape.op([part], num_passed=1)
    return multiply(tape, half, part)


def relu(tape: Tape, x: Tensor) -> Tensor:
    return tape.op([x], kernel=Kernel(saves_result=True))


_ACTIVATIONS = {"gelu": activation, "gelu_new": gelu_tanh, "relu": relu}


def attention_shape(tape: Tape, shape: ModelShape) -> AttentionShape:
    batch, seq = tape.habits.batch, tape.habits.seq
    return AttentionShape(batch, seq, shape.heads, shape.kv_heads, shape.head_dim, tape.itemsize)


def attention(tape: Tape, model: ModelShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention without a mask."""
    shape = attention_shape(tape, model)
    if model.attention == "eager":
        return _eager(tape, model, query, key, value)
    if shape.kernel == "math":
        return _written_out(tape, shape, query, key, value)
    # For the backward: the log-sum-exp of each row in fp32, and the state of a random generator.
    extra_bytes = rounded(4 * shape.batch * shape.heads * shape.seq) + 2 * ROUND_BYTES
    kernel = Kernel(True, extra_bytes, shape.scratch_bytes, attention_flops=shape.flops, is_kept=True)
    return tape.op([query, key, value], saves=[query, key, value], kernel=kernel)


def _written_out(tape: Tape, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with all scores in memory, a mask that is added to them, and keys and values repeated for each head."""
    num_scores = shape.batch * shape.heads * shape.seq * shape.seq
    scaled = scale(tape, query)
    mask = tape.new(shape.seq * shape.seq)
    key, value = (tape.op([part], query.num_elems) for part in (key, value))
    scaled_key = scale(tape, key)
    # `shape.flops` is half of two products. Here nothing is skipped, so each product takes that much.
    kernel = Kernel(attention_flops=shape.flops)
    scores = tape.op([scaled, scaled_key], num_scores, saves=[scaled, scaled_key], kernel=kernel)
    scores = tape.op([scores], num_passed=1)
    scratch = tape.new(num_scores, 1)  # one byte of mask for each score
    shares = softmax(tape, scores)
    del scores, scratch
    mixed = tape.op([shares, value], query.num_elems, saves=[shares, value], kernel=replace(kernel, is_kept=True))
    del mask
    return mixed


def _eager(tape: Tape, model: ModelShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with all scores in memory, as transformers writes it, with caps (Gemma 2) or sinks (gpt-oss)."""
    shape = attention_shape(tape, model)
    num_scores = shape.batch * shape.heads * shape.seq * shape.seq
    key, value = (tape.op([part], query.num_elems) for part in (key, value))
    kernel = Kernel(attention_flops=shape.flops)
    copied = tape.op([query], num_passed=1)
    scores = tape.op([copied, key], num_scores, saves=[copied, key], kernel=kernel)
    del copied
    scores = scale(tape, scores)
    if model.logits_capped:
        scores = scale(tape, scores)
        scores = tape.op([scores], kernel=Kernel(saves_result=True))
        scores = scale(tape, scores)
    scores = tape.op([scores], num_passed=1)  # the mask is added
    if model.has_sinks:
        scores = tape.op([scores])
        scores = tape.op([scores], num_passed=1)
        shares = softmax(tape, scores)
    else:
        shares = cast(tape, softmax(tape, cast(tape, scores, 4)), tape.itemsize)
    del scores
    mixed = tape.op([shares, value], query.num_elems, saves=[shares, value], kernel=replace(kernel, is_kept=True))
    return tape.op([mixed], num_passed=1)


def rotate(tape: Tape, x: Tensor) -> Tensor:
    """Rotary positions of the in-tree transformer: cast to fp32, rotate, cast back."""
    if tape.habits.is_fused:
        return scale(tape, x)
    # The view is a transpose to (heads, positions). Its gradient has another memory layout, and is copied once.
    turned_view = tape.view(x, is_copied_back=True)
    first, second = tape.split(cast(tape, turned_view, 4), (1, 1))
    # The gradient of a - b is passed on to `a`; `b` gets a new one. No variable holds the parts during the cast.
    turned = tape.cat(
        (
            tape.op([scale(tape, first), scale(tape, second)], num_passed=1),
            add(tape, scale(tape, second), scale(tape, first)),
        )
    )
    return cast(tape, turned, x.itemsize)


def llama_rotate(tape: Tape, x: Tensor, shape: ModelShape) -> Tensor:
    """transformers' rotary positions, in the compute dtype: x * cos + rotate_half(x) * sin."""
    if tape.habits.is_fused:
        return scale(tape, x)
    if shape.rotary_dim:
        num_rotated = x.num_elems * shape.rotary_dim // shape.head_dim
        rotated, rest = tape.view(x, num_rotated), tape.view(x, x.num_elems - num_rotated)
        return tape.cat((llama_rotate(tape, rotated, replace(shape, rotary_dim=0)), rest))
    scaled = scale(tape, x)
    first, second = (tape.view(x, x.num_elems // 2) for _ in range(2))
    return add(tape, scaled, scale(tape, tape.cat((scale(tape, second), first))))


def in_tree_block(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    hidden = shape.hidden
    x = add(t, x, _in_tree_attention(shape, t, rms_norm(t, x, hidden)))
    return add(t, x, gated_ffn(shape, t, rms_norm(t, x, hidden), ("gate", "up", "down")))


def _in_tree_attention(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    query = rotate(t, linear(t, x, (shape.hidden, shape.query_width), "query"))
    key = rotate(t, linear(t, x, (shape.hidden, shape.kv_width), "key"))
    value = linear(t, x, (shape.hidden, shape.kv_width), "value")
    mixed = attention(t, shape, query, key, value)
    # The result of attention is stored head by head, like the queries, and is copied to be stored token by token.
    is_copied = attention_shape(t, shape).kernel != "efficient"
    return linear(t, t.op([mixed], num_passed=1) if is_copied else mixed, (shape.query_width, shape.hidden), "out")


def gated_ffn(shape: ModelShape, t: Tape, x: Tensor, names: tuple[str, str, str]) -> Tensor:
    fan, bias = (shape.hidden, shape.ffn), shape.bias
    gate, up, down = names
    if t.habits.is_fused:
        mixed = gated(t, linear(t, x, fan, gate, bias), linear(t, x, fan, up, bias))
    else:
        mixed = multiply(t, activation(t, linear(t, x, fan, gate, bias)), linear(t, x, fan, up, bias))
    return linear(t, mixed, fan[::-1], down, bias)


def plain_ffn(
    shape: ModelShape, t: Tape, x: Tensor, names: tuple[str, str], act: Callable[[Tape, Tensor], Tensor],
    plain: bool = True,
) -> Tensor:  # fmt: skip
    fan = shape.hidden, shape.ffn
    x = linear(t, x, fan, names[0], shape.bias, plain=plain)
    x = act(t, x)
    return linear(t, x, fan[::-1], names[1], shape.bias, plain=plain)


def llama_block(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """transformers' block: variables hold the residuals. With four norms (Gemma), one follows attention, one ffn."""
    if shape.residual == "parallel":
        normed = norm(shape, t, x, shape.hidden)
        again = normed if shape.num_norms == 1 else norm(shape, t, x, shape.hidden)
        mixed = _llama_attention(shape, t, normed)
        del normed
        return add(t, add(t, _llama_ffn(shape, t, again), mixed), x)
    for part in (_llama_attention, _llama_ffn):
        residual = x
        if shape.residual == "pre":
            x = norm(shape, t, x, shape.hidden)
        x = part(shape, t, x)
        if shape.num_norms > 2 or shape.residual == "post":
            x = norm(shape, t, x, shape.hidden)
        x = add(t, residual, x)
    return x


def _latent_attention(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """DeepSeek's: keys and values are made of a narrow latent vector, and one rotated key serves all heads."""
    heads, rope, plain = shape.heads, shape.rope_dim, shape.head_dim - shape.rope_dim
    num_tokens = x.num_elems // shape.hidden
    if shape.q_rank:
        latent = norm(shape, t, linear(t, x, (shape.hidden, shape.q_rank), "q_a_proj"), shape.q_rank)
        query = linear(t, latent, (shape.q_rank, shape.query_width), "q_b_proj")
    else:
        query = linear(t, x, (shape.hidden, shape.query_width), "q_proj")
    passed, turned = t.split(query, (plain, rope))
    compressed = linear(t, x, (shape.hidden, shape.kv_rank + rope), "kv_a_proj_with_mqa")
    latent, shared = t.split(compressed, (shape.kv_rank, rope))
    latent = norm(shape, t, latent, shape.kv_rank)
    turned, shared = llama_rotate(t, turned, shape), llama_rotate(t, shared, shape)
    query = t.cat((passed, turned))
    both = linear(t, latent, (shape.kv_rank, heads * (plain + shape.value_dim)), "kv_b_proj")
    part, value = t.split(both, (plain, shape.value_dim))
    key = t.op([part, shared], num_tokens * shape.query_width)
    padded = t.op([value], key.num_elems)  # the kernel needs values as wide as keys
    mixed = attention(t, replace(shape, kv_heads=heads), query, key, padded)
    mixed = t.view(mixed, num_tokens * heads * shape.value_dim)
    return linear(t, t.op([mixed], num_passed=1), (heads * shape.value_dim, shape.hidden), "o_proj")


def _delta_net(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """Qwen3-Next's linear attention: one kernel for the convolution, one for the rule, which save their inputs."""
    keys, values = shape.linear_widths
    tokens = x.num_elems // shape.hidden
    both = linear(t, x, (shape.hidden, 2 * keys + 2 * values), "in_proj_qkvz")
    rates = linear(t, x, (shape.hidden, 2 * shape.linear_value_heads), "in_proj_ba")
    mixed, gate = t.split(both, (2 * keys + values, values))
    mixed = t.op([mixed])  # concatenated again
    mixed = t.op([mixed], saves=[mixed], weights=[t.habits.weight(4 * (2 * keys + values))])
    query, key, value = t.split(mixed, (keys, keys, values))
    query, key = (t.op([part], tokens * values) for part in (query, key))
    result = t.op([query, key, value, rates], tokens * values, saves=[query, key, value, rates])
    del both, mixed, query, key, value
    result = multiply(t, norm(shape, t, result, shape.linear_dim), cast(t, activation(t, cast(t, gate, 4)), t.itemsize))
    return linear(t, result, (values, shape.hidden), "out_proj")


def _llama_attention(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    if shape.linear_value_heads or shape.kv_rank:
        return (_delta_net if shape.linear_value_heads else _latent_attention)(shape, t, x)
    bias, widths = shape.qkv_bias, (shape.query_width, shape.kv_width, shape.kv_width)
    norms = [shape.head_dim if shape.qk_norm else width if shape.qk_norm_whole else 0 for width in widths]
    if shape.fused_qkv:
        fused, num_tokens = linear(t, x, (shape.hidden, sum(widths)), "qkv_proj", bias), x.num_elems // shape.hidden
        query, key, value = (t.view(fused, num_tokens * width) for width in widths)
    else:
        query = linear(t, x, (shape.hidden, widths[0] * (1 + shape.gated_attention)), "q_proj", bias)
        if shape.gated_attention:
            query, gate = t.split(query, (1, 1))
            gate = t.op([gate], num_passed=1)
        query = norm(shape, t, query, norms[0]) if norms[0] else query
        key = linear(t, x, (shape.hidden, widths[1]), "k_proj", bias)
        key = norm(shape, t, key, norms[1]) if norms[1] else key
        value = linear(t, x, (shape.hidden, widths[2]), "v_proj", bias)
    query, key = llama_rotate(t, query, shape), llama_rotate(t, key, shape)
    mixed = attention(t, shape, query, key, value)
    if shape.rotary_dim and shape.attention == "flash":  # `cat` stored the queries head by head, and the result is, too
        mixed = t.op([mixed], num_passed=1)
    if shape.gated_attention:
        mixed = multiply(t, mixed, t.op([gate], kernel=Kernel(saves_result=True)))
    return linear(t, mixed, (shape.query_width, shape.hidden), "o_proj", shape.bias)


def _llama_ffn(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    if shape.num_experts > 1 and shape.shared_ffn:
        shared = gated_ffn(replace(shape, ffn=shape.shared_ffn), t, x, ("gate_proj", "up_proj", "down_proj"))
        if shape.shared_gate:
            gate = t.op([linear(t, x, (shape.hidden, 1), "shared_expert_gate")], kernel=Kernel(saves_result=True))
            shared = t.op([shared, gate], saves=[shared, gate], kernel=Kernel(scratch_bytes=shared.num_bytes))
        return add(t, _experts(shape, t, x), shared)
    if shape.num_experts > 1:
        return _experts(shape, t, x)
    if shape.fused_gate_up:
        mixed = gated_halves(t, linear(t, x, (shape.hidden, 2 * shape.ffn), "gate_up_proj", shape.bias))
        return linear(t, mixed, (shape.ffn, shape.hidden), "down_proj", shape.bias)
    if shape.gated:
        return gated_ffn(shape, t, x, ("gate_proj", "up_proj", "down_proj"))
    return plain_ffn(shape, t, x, ("up_proj", "down_proj"), _ACTIVATIONS.get(shape.activation, activation))


def _experts(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """Copy tokens to their experts, each token `num_active_experts` times.

    The tokens of an expert depend on the data; here each gets the same number. Autograd allocates weight gradients.
    """
    num_tokens, ffn = x.num_elems // shape.hidden, shape.ffn_of_expert
    num_sent = num_tokens * (shape.num_experts if shape.sends_all else shape.num_active_experts)
    wide = cast(t, x, 4) if shape.wide_router else x
    scores = softmax(t, cast(t, linear(t, wide, (shape.hidden, shape.num_experts), "gate"), 4))
    del wide
    chosen = cast(t, t.view(scores, num_sent), t.itemsize)
    sent = t.op([x], num_sent * shape.hidden)
    weights = shape.num_experts
    both = linear(t, sent, (shape.hidden, 2 * ffn if shape.gated else ffn), "experts", plain=False, num_weights=weights)
    if shape.has_sinks:  # gpt-oss: a bias for each row, clamped halves, and a written-out activation
        both = add(t, both, t.new(both.num_elems))
        gate, up = (t.op([t.view(both, both.num_elems // 2)], saves=[both]) for _ in range(2))
        share = t.op([scale(t, gate)], kernel=Kernel(saves_result=True))
        mixed = multiply(t, gate, share)
        del share, gate
        mixed = multiply(t, scale(t, up), mixed)
        del up
    else:
        mixed = gated_halves(t, both) if shape.gated else activation(t, both)
    out = linear(t, mixed, (ffn, shape.hidden), "experts", plain=False, num_weights=weights)
    weighted = t.op([out, chosen], saves=[out, chosen], kernel=Kernel(scratch_bytes=out.num_bytes))
    del out, both, mixed, sent
    return t.op([weighted], x.num_elems)


def gpt_block(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """GPT-2's block: its projections are not torch's linear layers, and its dropout is on by default."""
    residual = x
    x = layer_norm(t, x, shape.hidden)
    mixed = _gpt_attention(shape, t, x)
    x = add(t, mixed, residual)
    residual = x
    x = layer_norm(t, x, shape.hidden)
    act = _ACTIVATIONS.get(shape.activation, gelu_tanh)
    return add(t, residual, dropout(t, plain_ffn(shape, t, x, ("c_fc", "c_proj"), act, plain=False)))


def _gpt_attention(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    widths = shape.query_width, shape.kv_width, shape.kv_width
    fan = shape.hidden, sum(widths)
    query, key, value = t.split(linear(t, x, fan, "c_attn", shape.qkv_bias, plain=False), widths)
    mixed = attention(t, shape, query, key, value)
    mixed = linear(t, mixed, (shape.query_width, shape.hidden), "c_proj", shape.bias, plain=False)
    return dropout(t, mixed)


def titan_block(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """torchtitan's Llama: rotary positions as complex numbers in fp32, keys and values repeated for every head. Its
    Qwen3 has norms of queries and keys, and the rotary positions of transformers."""

    def queries_keys_values(normed: Tensor) -> list[Tensor]:
        query, key, value = (
            linear(t, normed, (shape.hidden, width)) for width in (shape.query_width, shape.kv_width, shape.kv_width)
        )
        del normed
        if shape.qk_norm:
            query, key = (rms_norm(t, part, shape.head_dim) for part in (query, key))
            query, key = (llama_rotate(t, part, shape) for part in (query, key))
        else:
            query, key = (_complex_rotated(t, part) for part in (query, key))
        if shape.heads != shape.kv_heads:
            key, value = (t.op([part], query.num_elems) for part in (key, value))
        return [query, key, value]

    parts = queries_keys_values(llama_norm(t, x, shape.hidden))
    x = _attended(replace(shape, kv_heads=shape.heads), t, x, parts)
    return add(t, x, gated_ffn(shape, t, llama_norm(t, x, shape.hidden), ("w1", "w3", "w2")))


def _complex_rotated(t: Tape, x: Tensor) -> Tensor:
    return scale(t, x) if t.habits.is_fused else cast(t, scale(t, cast(t, x, 4)), x.itemsize)


def _attended(shape: ModelShape, t: Tape, x: Tensor, parts: list[Tensor]) -> Tensor:
    mixed = attention(t, shape, *parts)
    parts.clear()
    return add(t, x, linear(t, mixed, (shape.query_width, shape.hidden), bias=shape.bias))


def mpt_block(shape: ModelShape, t: Tape, x: Tensor) -> Tensor:
    """llm-foundry's block, with 16-bit layer norms and flash attention; one product makes queries, keys and values."""
    widths = shape.query_width, shape.kv_width, shape.kv_width
    normed = layer_norm(t, x, shape.hidden, bias=shape.norm_bias)
    parts = t.split(linear(t, normed, (shape.hidden, sum(widths)), bias=shape.qkv_bias), widths)
    del normed
    x = _attended(shape, t, x, parts)
    return add(t, x, plain_ffn(shape, t, layer_norm(t, x, shape.hidden, bias=shape.norm_bias), ("", ""), activation))
