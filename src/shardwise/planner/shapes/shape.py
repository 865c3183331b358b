"""A transformer as sizes, and the units that the real module of these sizes has.

`units_of` gives the same units as `find_units` on the module itself, names included, for the in-tree transformer and
for Llama, Mistral, Qwen3 and GPT-2 of transformers. Other families have Llama's names here (GPT-2's, if positions are
learned) and their own sizes: parameters that no field describes are counted in `other_elems`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Literal, get_args

from ...base.dtypes import FP32, DType
from ...base.errors import ConfigurationError, did_you_mean
from ...core.schedule.model import ROOT, Param, Site, UnitSpec
from ..training import Lora
from .parts import Part, Parts, conv, embedding, linear, units_from, vectors, with_adapters

Norm = Literal["rms", "layer"]
Code = Literal["in-tree", "hf"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer. `code`: the implementation (in-tree, or transformers'). `dtype`: that of the files, which
    frozen weights keep. With experts, `expert_ffn` is the width of one of them; 0: that of `ffn`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False  # the output projection is the embedding
    gated: bool = True  # the feed-forward has a third matrix
    bias: bool = False  # for the attention's output and the feed-forward
    qkv_bias: bool = False
    head_bias: bool = False  # for the output projection
    norm: Norm = "rms"
    norm_bias: bool = True  # for layer norms; RMS norms have none
    num_norms: int = 2  # per block
    qk_norm: bool = False  # queries and keys are normalised, each head by itself
    num_positions: int = 0  # number of learned positions
    num_experts: int = 1
    num_active_experts: int = 1
    expert_ffn: int = 0
    other_elems: int = 0  # further parameters of every block
    other_outside_elems: int = 0  # further parameters outside of blocks
    code: Code = "hf"
    dtype: DType = FP32

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigurationError(
                    f"shape {self.name!r}: {name} is {value!r}, but must be a whole number of at least {least}"
                )
            if value > (most := _MOST.get(name, MOST_OF_A_SIZE)):
                raise ConfigurationError(
                    f"shape {self.name!r}: {name} is {value:,}, but at most {most:,} is planned for"
                )
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"shape {self.name!r}: {self.heads} heads do not divide into {self.kv_heads} key-value heads, each of "
                "which serves the same number of them"
            )
        if self.num_active_experts > self.num_experts:
            raise ConfigurationError(
                f"shape {self.name!r}: {self.num_active_experts} active experts, but there are {self.num_experts}"
            )
        for name, known in (("norm", get_args(Norm)), ("code", get_args(Code))):
            if getattr(self, name) not in known:
                value = str(getattr(self, name))
                raise ConfigurationError(f"shape {self.name!r}: {name} {value!r}; {did_you_mean(value, known)}")
        if self.code == "in-tree":
            self._check_in_tree()

    def _check_in_tree(self) -> None:
        if self.query_width != self.hidden or self.head_dim % 2:
            raise ConfigurationError(
                f"shape {self.name!r}: {self.heads} heads of {self.head_dim} with hidden {self.hidden}, but the "
                "in-tree transformer has heads of hidden / heads, an even number"
            )
        plain = {entry.name: entry.default for entry in fields(self) if entry.name not in _IN_TREE_HAS}
        other = next((name for name, value in plain.items() if getattr(self, name) != value), None)
        if other is not None:
            raise ConfigurationError(
                f"shape {self.name!r}: {other} is {getattr(self, other)!r}, but always {plain[other]!r} in the in-tree "
                "transformer; say code=hf"
            )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def ffn_of_expert(self) -> int:
        """Width of one expert, or of the only feed-forward if there are no experts."""
        return (self.expert_ffn or self.ffn) if self.num_experts > 1 else self.ffn

    @cached_property
    def num_params(self) -> int:
        return _parts(self).num_elems

    @cached_property
    def num_multiplying(self) -> int:
        """Parameters that a token is multiplied by: no embeddings, except a tied head; only the active experts."""
        looked_up = (0 if self.tied else self.vocab * self.hidden) + self.num_positions * self.hidden
        num_idle = self.num_experts - self.num_active_experts
        idle = self.layers * num_idle * (3 if self.gated else 2) * self.hidden * self.ffn_of_expert
        return self.num_params - looked_up - idle


_LEAST = {
    "layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "ffn": 1, "vocab": 1, "num_norms": 1,
    "num_experts": 1, "num_active_experts": 1, "num_positions": 0, "expert_ffn": 0, "other_elems": 0,
    "other_outside_elems": 0,
}  # fmt: skip
MOST_OF_A_SIZE = 10**9
_MOST = {"layers": 1_000, "num_norms": 4, "other_elems": 10**15, "other_outside_elems": 10**15}
_IN_TREE_HAS = {
    "name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "norm_bias", "code", "dtype",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StatesOnly:
    """A model of which only the number of parameters is known. `note` says why."""

    num_params: int
    label: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if type(self.num_params) is not int or self.num_params < 1:
            raise ConfigurationError(f"shape: params={self.num_params!r}, but it must be a whole number of at least 1")

    @property
    def name(self) -> str:
        return self.label or f"params={self.num_params:g}"


def units_of(shape: ModelShape | StatesOnly, lora: Lora | None = None) -> list[UnitSpec]:
    """Return the units of a module of this shape, with adapters if `lora` is given."""
    return list(_units(shape, lora))


@lru_cache(maxsize=32)
def _units(shape: ModelShape | StatesOnly, lora: Lora | None) -> tuple[UnitSpec, ...]:
    if isinstance(shape, StatesOnly):
        if lora is not None:
            raise ConfigurationError("lora: it needs the sizes of the layers, and --shape params=... has none")
        whole = Param("params", (1, shape.num_params), FP32, True, (Site("", "params"),))
        return (UnitSpec(ROOT, "", (whole,), holds_units=False, backward_reads=True),)
    parts = _parts(shape)
    # Blocks of transformers are recognised by class, those of the in-tree model by repetition.
    splits_blocks = shape.code == "hf" or shape.layers > 1
    if lora is not None:
        parts = with_adapters(parts, lora.r, targets_of(shape, lora))
    return tuple(units_from(parts, shape.dtype, splits_blocks=splits_blocks, trains_all=lora is None))


_IN_TREE_WORDS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip


def targets_of(shape: ModelShape, lora: Lora) -> tuple[str, ...]:
    """Return the requested targets, or peft's choice for the family."""
    if shape.code == "in-tree":
        return tuple(_IN_TREE_WORDS.get(name, name) for name in lora.targets) or ("query", "value")
    return lora.targets or (("c_attn",) if shape.num_positions else ("q_proj", "v_proj"))


def _parts(shape: ModelShape) -> Parts:
    has_bias = shape.norm == "layer" and shape.norm_bias
    words, blocks, norm, head = _OUTSIDE[_names(shape)]
    before = [embedding(words, shape.vocab, shape.hidden)]
    if shape.num_positions:
        before.append(embedding("transformer.wpe", shape.num_positions, shape.hidden))
    return Parts(
        before=tuple(before),
        block=tuple(_BLOCKS[_names(shape)](shape, has_bias)),
        block_paths=tuple(f"{blocks}.{index}" for index in range(shape.layers)),
        after=(
            vectors(norm, shape.hidden, has_bias),
            *_other(shape.other_outside_elems),
            linear(head, shape.hidden, shape.vocab, shape.head_bias, is_tied=shape.tied),
        ),
    )


def _names(shape: ModelShape) -> str:
    """The naming scheme of its parameters."""
    if shape.code == "in-tree":
        return "in-tree"
    return "gpt" if shape.num_positions else "llama"


def _in_tree_block(shape: ModelShape, _: bool) -> Iterator[Part]:
    hidden = shape.hidden
    yield vectors("attention_norm", hidden)
    yield linear("attention.query", hidden, shape.query_width)
    yield linear("attention.key", hidden, shape.kv_width)
    yield linear("attention.value", hidden, shape.kv_width)
    yield linear("attention.out", shape.query_width, hidden)
    yield vectors("ffn_norm", hidden)
    yield linear("ffn.gate", hidden, shape.ffn)
    yield linear("ffn.up", hidden, shape.ffn)
    yield linear("ffn.down", shape.ffn, hidden)


def _llama_block(shape: ModelShape, norm_bias: bool) -> Iterator[Part]:
    hidden, ffn = shape.hidden, shape.ffn
    yield linear("self_attn.q_proj", hidden, shape.query_width, shape.qkv_bias)
    yield linear("self_attn.k_proj", hidden, shape.kv_width, shape.qkv_bias)
    yield linear("self_attn.v_proj", hidden, shape.kv_width, shape.qkv_bias)
    yield linear("self_attn.o_proj", shape.query_width, hidden, shape.bias)
    if shape.qk_norm:
        yield vectors("self_attn.q_norm", shape.head_dim, norm_bias)
        yield vectors("self_attn.k_norm", shape.head_dim, norm_bias)
    if shape.num_experts > 1:
        yield from _experts(shape)
    else:
        if shape.gated:
            yield linear("mlp.gate_proj", hidden, ffn, shape.bias)
        yield linear("mlp.up_proj", hidden, ffn, shape.bias)
        yield linear("mlp.down_proj", ffn, hidden, shape.bias)
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield from (vectors(name, hidden, norm_bias) for name in names[: shape.num_norms])
    yield from _other(shape.other_elems)


def _gpt_block(shape: ModelShape, norm_bias: bool) -> Iterator[Part]:
    hidden = shape.hidden
    yield vectors("ln_1", hidden, norm_bias)
    yield conv("attn.c_attn", hidden, shape.query_width + 2 * shape.kv_width, shape.qkv_bias)
    yield conv("attn.c_proj", shape.query_width, hidden, shape.bias)
    if shape.qk_norm:
        yield vectors("attn.q_norm", shape.head_dim, norm_bias)
        yield vectors("attn.k_norm", shape.head_dim, norm_bias)
    if shape.num_norms > 1:
        yield vectors("ln_2", hidden, norm_bias)
    if shape.num_experts > 1:
        yield from _experts(shape)
    else:
        yield conv("mlp.c_fc", hidden, shape.ffn * (2 if shape.gated else 1), shape.bias)
        yield conv("mlp.c_proj", shape.ffn, hidden, shape.bias)
    yield from _other(shape.other_elems)


def _experts(shape: ModelShape) -> Iterator[Part]:
    """All experts in two tensors, as in transformers since version 5."""
    num, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn_of_expert
    yield Part("mlp.gate", (("weight", (num, hidden)),))
    inward, width = ("gate_up_proj", 2 * ffn) if shape.gated else ("up_proj", ffn)
    yield Part("mlp.experts", ((inward, (num, width, hidden)), ("down_proj", (num, hidden, ffn))))


def _other(num_elems: int) -> Iterator[Part]:
    if num_elems:
        yield vectors("other", num_elems)


_BLOCKS = {"in-tree": _in_tree_block, "llama": _llama_block, "gpt": _gpt_block}
_OUTSIDE = {
    "in-tree": ("embed", "blocks", "norm", "head"),
    "llama": ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "gpt": ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
}
