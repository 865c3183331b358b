"""The modules with parameters of a transformer of given sizes: their names, and the sizes of what they own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ...base.errors import ConfigurationError, did_you_mean
from ...core.schedule.model import parts_of
from ..training import Lora

if TYPE_CHECKING:
    from .shape import ModelShape

WRAPPER = "base_model.model."  # peft's prefix of every name


@dataclass(frozen=True, slots=True)
class Part:
    """A module that owns parameters. `params`: the attribute and the size of each.

    `fan`: input and output width of a projection that can have adapters. `is_tied`: its weight is that of the first
    part of the model, the embedding.
    """

    path: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    fan: tuple[int, int] | None = None
    is_embedding: bool = False
    is_tied: bool = False
    is_adapter: bool = False

    @property
    def num_elems(self) -> int:
        return sum(prod(size) for _, size in self.params)


def _linear(
    path: str, fan_in: int, fan_out: int, bias: bool = False, is_tied: bool = False, is_conv: bool = False
) -> Part:
    """A projection; `is_conv`: one of GPT-2's, whose weight is transposed."""
    weight = ("weight", (fan_in, fan_out) if is_conv else (fan_out, fan_in))
    return Part(path, (weight, ("bias", (fan_out,))) if bias else (weight,), (fan_in, fan_out), is_tied=is_tied)


def _vectors(path: str, width: int, bias: bool = False) -> Part:
    """A module with vectors of this width, such as a norm."""
    return Part(path, (("weight", (width,)), ("bias", (width,))) if bias else (("weight", (width,)),))


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a model. `blocks`: path and parts of each block, with relative paths; equal blocks share them."""

    before: tuple[Part, ...]
    blocks: tuple[tuple[str, "Block"], ...]
    after: tuple[Part, ...]

    @property
    def num_elems(self) -> int:
        outside = sum(part.num_elems for part in (*self.before, *self.after))
        outside -= sum(prod(part.params[0][1]) for part in self.after if part.is_tied)
        return outside + sum(block.num_elems for _, block in self.blocks)


class Block(tuple[Part, ...]):
    """The parts of a block."""

    @cached_property
    def num_elems(self) -> int:
        return sum(part.num_elems for part in self)

    @cached_property
    def units(self) -> list[str]:
        """Paths of its units: "" for the block, and parts of a block that is too large to be one unit."""
        return ["", *_large_parts(self)]

    @cached_property
    def owners(self) -> list[str]:
        """The unit of each part."""
        return [max((unit for unit in self.units if _is_in(part.path, unit)), key=len) for part in self]


_IN_TREE_WORDS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip


def targets_of(shape: "ModelShape", lora: Lora) -> tuple[str, ...]:
    """Return the requested targets, or peft's choice for the family."""
    if shape.code == "in-tree":
        return tuple(_IN_TREE_WORDS.get(name, name) for name in lora.targets) or ("query", "value")
    return lora.targets or (("c_attn",) if shape.num_positions else ("q_proj", "v_proj"))


def parts_in(shape: "ModelShape") -> Parts:
    has_bias = shape.norm == "layer" and shape.norm_bias
    names = "in-tree" if shape.code == "in-tree" else "gpt" if shape.num_positions else "llama"
    make_block, words, blocks, norm, head = _NAMING[names]
    before = [Part(words, (("weight", (shape.vocab, shape.hidden)),), is_embedding=True)]
    if shape.num_positions:
        sizes = (("weight", (shape.num_positions, shape.hidden)),)
        before.append(Part("transformer.wpe", sizes, is_embedding=True))
    kinds = {id(kind): kind for kind in shape.kinds}
    made = {key: Block(make_block(kind, has_bias)) for key, kind in kinds.items()}
    return Parts(
        before=tuple(before),
        blocks=tuple((f"{blocks}.{index}", made[id(kind)]) for index, kind in enumerate(shape.kinds)),
        after=(
            _vectors(norm, shape.hidden, has_bias),
            *_other(shape.other_outside_elems),
            _linear(head, shape.hidden, shape.vocab, shape.head_bias, is_tied=shape.tied),
        ),
    )


def _in_tree_block(shape: "ModelShape", _: bool) -> Iterator[Part]:
    hidden = shape.hidden
    yield _vectors("attention_norm", hidden)
    widths = {"query": shape.query_width, "key": shape.kv_width, "value": shape.kv_width}
    yield from (_linear(f"attention.{name}", hidden, width) for name, width in widths.items())
    yield _linear("attention.out", shape.query_width, hidden)
    yield _vectors("ffn_norm", hidden)
    yield _linear("ffn.gate", hidden, shape.ffn)
    yield _linear("ffn.up", hidden, shape.ffn)
    yield _linear("ffn.down", shape.ffn, hidden)


def _llama_block(shape: "ModelShape", norm_bias: bool) -> Iterator[Part]:
    hidden, ffn = shape.hidden, shape.ffn
    if shape.linear_heads[0]:
        yield from _delta_net(shape)
    elif shape.kv_rank:
        yield from _latent_attention(shape)
    else:
        yield from _attention(shape, norm_bias)
    if shape.num_experts > 1:
        yield from _experts(shape)
    elif shape.fused_gate_up:
        yield _linear("mlp.gate_up_proj", hidden, 2 * ffn, shape.bias)
        yield _linear("mlp.down_proj", ffn, hidden, shape.bias)
    else:
        if shape.gated:
            yield _linear("mlp.gate_proj", hidden, ffn, shape.bias)
        yield _linear("mlp.up_proj", hidden, ffn, shape.bias)
        yield _linear("mlp.down_proj", ffn, hidden, shape.bias)
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield from (_vectors(name, hidden, norm_bias) for name in names[: shape.num_norms])
    yield from _other(shape.other_elems)


def _attention(shape: "ModelShape", norm_bias: bool) -> Iterator[Part]:
    widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    made = {"qkv": sum(widths.values())} if shape.fused_qkv else widths
    made = {**made, "q": 2 * widths["q"]} if shape.gated_attention else made
    yield from (_linear(f"self_attn.{name}_proj", shape.hidden, width, shape.qkv_bias) for name, width in made.items())
    yield _linear("self_attn.o_proj", shape.query_width, shape.hidden, shape.bias)
    if shape.qk_norm or shape.qk_norm_whole:
        for name in "qk":
            width = shape.head_dim if shape.qk_norm else widths[name]
            yield _vectors(f"self_attn.{name}_norm", width, norm_bias)


def _latent_attention(shape: "ModelShape") -> Iterator[Part]:
    if shape.q_rank:
        yield _linear("self_attn.q_a_proj", shape.hidden, shape.q_rank)
        yield _vectors("self_attn.q_a_layernorm", shape.q_rank)
        yield _linear("self_attn.q_b_proj", shape.q_rank, shape.query_width)
    else:
        yield _linear("self_attn.q_proj", shape.hidden, shape.query_width)
    yield _linear("self_attn.kv_a_proj_with_mqa", shape.hidden, shape.kv_rank + shape.rope_dim)
    yield _vectors("self_attn.kv_a_layernorm", shape.kv_rank)
    per_head = shape.head_dim - shape.rope_dim + shape.value_dim
    yield _linear("self_attn.kv_b_proj", shape.kv_rank, shape.heads * per_head)
    yield _linear("self_attn.o_proj", shape.heads * shape.value_dim, shape.hidden)


def _delta_net(shape: "ModelShape") -> Iterator[Part]:
    """Yield Qwen3-Next's linear attention."""
    keys, values = (heads * shape.linear_dim for heads in shape.linear_heads)
    yield Part("linear_attn", (("dt_bias", (shape.linear_heads[1],)), ("A_log", (shape.linear_heads[1],))))
    yield Part("linear_attn.conv1d", (("weight", (2 * keys + values, 1, 4)),))
    yield _linear("linear_attn.in_proj_qkvz", shape.hidden, 2 * keys + 2 * values)
    yield _linear("linear_attn.in_proj_ba", shape.hidden, 2 * shape.linear_heads[1])
    yield _vectors("linear_attn.norm", shape.linear_dim)
    yield _linear("linear_attn.out_proj", values, shape.hidden)


def _gpt_block(shape: "ModelShape", norm_bias: bool) -> Iterator[Part]:
    hidden = shape.hidden
    yield _vectors("ln_1", hidden, norm_bias)
    yield _linear("attn.c_attn", hidden, shape.query_width + 2 * shape.kv_width, shape.qkv_bias, is_conv=True)
    yield _linear("attn.c_proj", shape.query_width, hidden, shape.bias, is_conv=True)
    if shape.qk_norm:
        yield _vectors("attn.q_norm", shape.head_dim, norm_bias)
        yield _vectors("attn.k_norm", shape.head_dim, norm_bias)
    if shape.num_norms > 1:
        yield _vectors("ln_2", hidden, norm_bias)
    if shape.num_experts > 1:
        yield from _experts(shape)
    else:
        yield _linear("mlp.c_fc", hidden, shape.ffn * (2 if shape.gated else 1), shape.bias, is_conv=True)
        yield _linear("mlp.c_proj", shape.ffn, hidden, shape.bias, is_conv=True)
    yield from _other(shape.other_elems)


def _experts(shape: "ModelShape") -> Iterator[Part]:
    """Yield the router, and all experts in two tensors, as in transformers since version 5."""
    num, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn_of_expert
    router = Part("mlp.gate", (("weight", (num, hidden)),))
    inward, width = ("gate_up_proj", 2 * ffn) if shape.gated else ("up_proj", ffn)
    experts = Part("mlp.experts", ((inward, (num, width, hidden)), ("down_proj", (num, hidden, ffn))))
    # Qwen's order, with a gate for the shared expert, or DeepSeek's.
    yield from (router, experts) if shape.shared_gate or not shape.shared_ffn else (experts, router)
    if shape.shared_ffn:
        shared = "mlp.shared_expert" if shape.shared_gate else "mlp.shared_experts"
        yield from (_linear(f"{shared}.{name}_proj", hidden, shape.shared_ffn) for name in ("gate", "up"))
        yield _linear(f"{shared}.down_proj", shape.shared_ffn, hidden)
    if shape.shared_gate:
        yield _linear("mlp.shared_expert_gate", hidden, 1)


def _other(num_elems: int) -> Iterator[Part]:
    if num_elems:
        yield _vectors("other", num_elems)


# The block, and the names of embedding, blocks, last norm and head.
_NAMING = {
    "in-tree": (_in_tree_block, "embed", "blocks", "norm", "head"),
    "llama": (_llama_block, "model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "gpt": (_gpt_block, "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
}


def with_adapters(parts: Parts, r: int, targets: Sequence[str]) -> Parts:
    """Add adapters, like peft, to every projection whose path ends in one of the targets."""
    example = f"{parts.blocks[0][0]}."
    paths = [part.path for part in (*parts.before, *parts.after) if part.fan]
    kinds = {id(block): block for _, block in parts.blocks}
    paths += [example + part.path for block in kinds.values() for part in block if part.fan]
    for target in targets:
        if not any(_ends_in(path, (target,)) for path in paths):
            leaves = {path.rpartition(".")[2] for path in paths}
            raise ConfigurationError(f"lora: no projection is called {target!r}; {did_you_mean(target, leaves)}")

    def adapted(part: Part, around: str = "") -> list[Part]:
        if part.fan is None or not _ends_in(around + part.path, targets):
            return [part]
        fan_in, fan_out = part.fan
        inward = Part(f"{part.path}.lora_A.default", (("weight", (r, fan_in)),), is_adapter=True)
        outward = Part(f"{part.path}.lora_B.default", (("weight", (fan_out, r)),), is_adapter=True)
        return [replace(part, path=f"{part.path}.base_layer"), inward, outward]

    def wrapped(group: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(new, path=WRAPPER + new.path) for part in group for new in adapted(part))

    made = {key: Block(new for part in block for new in adapted(part, example)) for key, block in kinds.items()}
    blocks = tuple((WRAPPER + path, made[id(block)]) for path, block in parts.blocks)
    return Parts(wrapped(parts.before), blocks, wrapped(parts.after))


def _ends_in(path: str, targets: Sequence[str]) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _large_parts(block: Sequence[Part]) -> list[str]:
    """Return the paths inside a block that become units if the block is too large."""

    def size(path: str) -> int:
        return sum(part.num_elems for part in block if _is_in(part.path, path))

    def children(path: str) -> Iterable[str]:
        names = [
            part.path.removeprefix(path).lstrip(".").partition(".")[0] for part in block if _is_in(part.path, path)
        ]
        return [f"{path}.{name}".lstrip(".") for name in dict.fromkeys(names) if name]

    return parts_of("", size, children)


def _is_in(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(f"{unit}.")
