"""A transformer as sizes, and the units that the real module of these sizes has.

`units_of` gives the same units as `find_units` on the module itself, names included, for the in-tree transformer and
for Llama, Mistral, Qwen3 and GPT-2 of transformers. Units of other families have the right sizes, but Llama's names
(GPT-2's, if positions are learned). Parameters that no field describes are counted in `other_elems`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

from ...base.dtypes import FP32, DType
from ...base.errors import ConfigurationError, did_you_mean, require_limits
from ...core.schedule.model import ROOT, Param, Site, UnitSpec, least_outside
from ..training import ALL_LINEAR, Lora
from .parts import Block, Part, Parts, linear, other, vectors, with_adapters

Norm = Literal["rms", "rms-fp32", "layer"]
Residual = Literal["pre", "post", "parallel"]  # where norms are; parallel: attention and feed-forward read one input
Attention = Literal["flash", "eager"]
Code = Literal["in-tree", "hf", "titan", "mpt"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer. `code`: the implementation (in-tree, or transformers'). `dtype`: of the weights in the
    files; frozen weights keep it. `expert_ffn`: the width of one expert; 0: the same as `ffn`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
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
    qk_norm_whole: bool = False  # the same, all heads together
    residual: Residual = "pre"
    activation: str = ""  # "": SiLU, or in blocks with learned positions GPT-2's GELU
    fused_qkv: bool = False  # one projection makes queries, keys and values
    fused_gate_up: bool = False
    rotary_dim: int = 0  # the part of a head that is rotated; 0: all, without a split
    attention: Attention = "flash"
    logits_capped: bool = False  # by tanh, those of attention and of the head
    has_sinks: bool = False  # gpt-oss: attention sinks, biases and clamps in experts
    q_rank: int = 0  # latent attention: rank of the queries (0: full), and of keys and values (0: no latent attention)
    kv_rank: int = 0
    rope_dim: int = 0  # the part of its `head_dim` that is rotated, with one key for all heads
    value_dim: int = 0
    attention_every: int = 1  # only every n-th block has attention; others have a gated delta net (linear attention)
    linear_key_heads: int = 0  # its heads of keys and of values, all of size `linear_dim`
    linear_value_heads: int = 0
    linear_dim: int = 0
    gated_attention: bool = False  # the queries' projection also makes a gate for each
    num_positions: int = 0  # number of learned positions
    num_experts: int = 1
    num_active_experts: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0  # width of the experts that all tokens use, together
    shared_gate: bool = False
    dense_layers: int = 0  # number of first blocks without experts; their feed-forward has the width `ffn`
    experts_every: int = 1  # of the other blocks, only every n-th has experts
    wide_router: bool = False  # it computes in fp32
    sends_all: bool = False  # every expert computes every token (Llama 4 in transformers)
    other_elems: int = 0  # further parameters of every block
    other_outside_elems: int = 0  # further parameters outside of blocks
    code: Code = "hf"
    dtype: DType = FP32
    note: str = ""  # what is not counted

    def __post_init__(self) -> None:
        require_limits(f"shape {self.name!r}", self, _LIMITS)
        has_head_dim = self.head_dim > 0
        # Defaults that depend on other fields. A frozen dataclass can be changed only in this way.
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if not has_head_dim and self.query_width != self.hidden:
            heads = f"hidden {self.hidden} does not divide into {self.heads} heads"
            raise ConfigurationError(f"shape {self.name!r}: {heads}; give the size of a head (head_dim)")
        for why in self._problems():
            raise ConfigurationError(f"shape {self.name!r}: {why}")

    def _problems(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            yield f"{self.heads} heads do not divide into {self.kv_heads} key-value heads; give a multiple of them"
        if self.num_active_experts > self.num_experts:
            yield f"{self.num_active_experts} active experts, but there are {self.num_experts}"
        for name, known in (("norm", get_args(Norm)), ("code", get_args(Code)),
                            ("residual", get_args(Residual)), ("attention", get_args(Attention))):  # fmt: skip
            if (value := getattr(self, name)) not in known:
                yield f"{name} {str(value)!r}; {did_you_mean(str(value), known)}"
        if self.code == "in-tree" and (self.query_width != self.hidden or self.head_dim % 2):
            heads = f"{self.heads} heads of {self.head_dim} with hidden {self.hidden}"
            yield f"{heads}, but the in-tree transformer has heads of hidden / heads, an even number"
        if self.code in _HAS:
            who, names, always = _HAS[self.code]
            wanted = {entry.name: entry.default for entry in fields(self) if entry.name not in names} | always
            for name, value in wanted.items():
                if getattr(self, name) != value:
                    yield f"{name} is {getattr(self, name)!r}, but always {value!r} in {who}; say code=hf"

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Widths of the keys and of the values of linear attention."""
        return self.linear_key_heads * self.linear_dim, self.linear_value_heads * self.linear_dim

    @property
    def has_norm_biases(self) -> bool:
        return self.norm == "layer" and self.norm_bias

    @property
    def ffn_of_expert(self) -> int:
        """Width of one expert, or of the only feed-forward if there are no experts."""
        return (self.expert_ffn or self.ffn) if self.num_experts > 1 else self.ffn

    @property
    def attention_width(self) -> int:
        """Width of queries and values, on average."""
        return self.heads * (self.head_dim + self.value_dim) // 2 if self.kv_rank else self.query_width

    @cached_property
    def kinds(self) -> "tuple[ModelShape, ...]":
        """The shape of every block: without experts, or with linear attention, where the block has these."""
        plain = {"num_experts": 1, "num_active_experts": 1, "shared_ffn": 0, "shared_gate": False, "sends_all": False}
        made: dict[tuple[bool, bool], ModelShape] = {}
        found = []
        for index in range(self.layers):
            is_dense = index < self.dense_layers or (index + 1) % self.experts_every > 0
            is_linear = (index + 1) % self.attention_every > 0
            if (is_dense, is_linear) not in made:
                changes: dict[str, Any] = {"dense_layers": 0, "experts_every": 1, "attention_every": 1}
                changes |= (plain if is_dense else {}) | ({} if is_linear else {"linear_value_heads": 0})
                is_same = all(getattr(self, name) == value for name, value in changes.items())
                made[is_dense, is_linear] = self if is_same else replace(self, **changes)
            found.append(made[is_dense, is_linear])
        return tuple(found)

    @cached_property
    def num_params(self) -> int:
        return parts_in(self).num_elems

    @cached_property
    def num_matmul_params(self) -> int:
        """Parameters that a token is multiplied by: no embeddings, except a tied head; only the active experts."""
        looked_up = (0 if self.tied else self.vocab * self.hidden) + self.num_positions * self.hidden
        num_idle = sum(kind.num_experts - kind.num_active_experts for kind in self.kinds)
        return self.num_params - looked_up - num_idle * (3 if self.gated else 2) * self.hidden * self.ffn_of_expert


MOST_OF_A_SIZE = 10**9
_LIMITS = {
    **{
        entry.name: (0 if entry.default == 0 else 1, MOST_OF_A_SIZE)
        for entry in fields(ModelShape)
        if entry.type is int
    },
    **dict.fromkeys(("layers", "experts_every", "attention_every"), (1, 1_000)),
    "num_norms": (1, 4),
    **dict.fromkeys(("other_elems", "other_outside_elems"), (0, 10**15)),
}
_SIZES = {
    "name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "norm_bias", "code", "dtype",
}  # fmt: skip
# Code whose blocks are all alike: what may differ in it, and values that it always has.
_HAS: dict[str, tuple[str, set[str], dict[str, object]]] = {
    "in-tree": ("the in-tree transformer", _SIZES, {}),
    "titan": ("torchtitan's Llama and Qwen3", {*_SIZES, "qk_norm"}, {}),
    "mpt": ("llm-foundry's MPT", {*_SIZES, "bias", "qkv_bias", "num_positions"}, {"gated": False, "norm": "layer"}),
}


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


def units_of(shape: ModelShape, lora: Lora | None = None) -> list[UnitSpec]:
    """Return the units of a module of this shape, with adapters in fp32 if `lora` is given."""
    return list(_units(shape, lora))


@lru_cache(maxsize=32)
def _units(shape: ModelShape, lora: Lora | None) -> tuple[UnitSpec, ...]:
    parts = parts_in(shape)
    # `find_units` recognises blocks of transformers by class, and those of the in-tree model by repetition.
    splits_blocks = shape.code == "hf" or shape.layers > 1
    if lora is not None:
        parts = with_adapters(parts, lora, targets_of(shape, lora), _copied(shape, lora))
    # The embedding, and its copy if there is one, with the path of the head that shares its weight.
    tied = dict(zip(parts.before, (Site(part.path, "weight") for part in parts.after if part.is_tied), strict=False))
    least = least_outside(max(block.num_elems for _, block in parts.blocks)) if splits_blocks else parts.num_elems + 1
    owned: dict[str, list[Param]] = {ROOT: []}

    def params_of(part: Part, path: str) -> list[Param]:
        trainable, dtype = lora is None or part.is_adapter or part.is_copy, FP32 if part.is_adapter else shape.dtype
        return [
            Param(f"{path}.{attribute}", size, dtype, trainable, (Site(path, attribute),), part.is_embedding)
            for attribute, size in part.params
        ]

    def add_outside(group: tuple[Part, ...]) -> None:
        for part in group:
            params = params_of(part, part.path)
            if part.is_tied:
                del params[0]
            elif part in tied:
                owned[ROOT].append(replace(params[0], sites=(*params[0].sites, tied[part])))
                del params[0]
            owned.setdefault(part.path if part.num_elems >= least else ROOT, []).extend(params)

    add_outside(parts.before)
    # A block is one unit, or one for each large part and one for the rest.
    holding = set()
    for path, block in parts.blocks:
        names = {unit: (f"{path}.{unit}" if unit else path) if splits_blocks else ROOT for unit in block.units}
        holding |= {path} if splits_blocks and len(names) > 1 else set()
        for name in names.values():
            owned.setdefault(name, [])
        for part, owner in zip(block, block.owners, strict=True):
            owned[names[owner]] += params_of(part, f"{path}.{part.path}")
    add_outside(parts.after)
    owned = {name: params for name, params in owned.items() if params}
    holding |= {ROOT} if len(owned) > 1 else set()
    return tuple(
        UnitSpec(
            name,
            "" if name == ROOT else name,
            tuple(params),
            name in holding,
            # Only the backward of an embedding does not read its weight.
            not all(param.is_table for param in params) or (name == ROOT and bool(tied)),
        )
        for name, params in owned.items()
    )


_IN_TREE_WORDS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "embed_tokens": "embed", "lm_head": "head",
}  # fmt: skip


def targets_of(shape: ModelShape, lora: Lora) -> tuple[str, ...]:
    """Return the requested targets, or peft's choice for the family (queries and values, however they are made)."""
    if lora.targets == (ALL_LINEAR,):
        parts = (part for _, block in parts_in(shape).blocks for part in block if part.fan)
        return tuple(dict.fromkeys(part.path.rpartition(".")[2] for part in parts))
    if shape.code == "in-tree":
        return tuple(_IN_TREE_WORDS.get(name, name) for name in lora.targets) or ("query", "value")
    if shape.num_positions or shape.fused_qkv:
        return lora.targets or (("c_attn",) if shape.num_positions else ("qkv_proj",))
    usual = ("q_b_proj" if shape.q_rank else "q_proj", "kv_b_proj") if shape.kv_rank else ("q_proj", "v_proj")
    return lora.targets or usual


def _copied(shape: ModelShape, lora: Lora) -> tuple[str, ...]:
    """Return the modules that are copied. A table that is also the head stays so, as in the trainer."""
    _, words, _, _, head = _NAMING[_naming(shape)]
    own = _IN_TREE_WORDS if shape.code == "in-tree" else {}
    names = tuple(own.get(name, name) for name in lora.modules_to_save)
    both = (words.rpartition(".")[2], head)
    return (*names, *both) if shape.tied and {*both} & {*names} else names


def _naming(shape: ModelShape) -> str:
    return "in-tree" if shape.code == "in-tree" else "gpt" if shape.num_positions else "llama"


def parts_in(shape: ModelShape) -> Parts:
    make_block, words, blocks, norm, head = _NAMING[_naming(shape)]
    tables = {words: shape.vocab} | ({"transformer.wpe": shape.num_positions} if shape.num_positions else {})
    kinds = {id(kind): kind for kind in shape.kinds}
    made = {key: Block(make_block(kind)) for key, kind in kinds.items()}
    return Parts(
        before=tuple(
            Part(path, (("weight", (rows, shape.hidden)),), is_embedding=True) for path, rows in tables.items()
        ),
        blocks=tuple((f"{blocks}.{index}", made[id(kind)]) for index, kind in enumerate(shape.kinds)),
        after=(
            vectors(norm, shape.hidden, shape.has_norm_biases),
            *other(shape.other_outside_elems),
            linear(head, shape.hidden, shape.vocab, shape.head_bias, is_tied=shape.tied),
        ),
    )


def _in_tree_block(shape: ModelShape) -> Iterator[Part]:
    hidden = shape.hidden
    yield vectors("attention_norm", hidden)
    widths = {"query": shape.query_width, "key": shape.kv_width, "value": shape.kv_width}
    yield from (linear(f"attention.{name}", hidden, width) for name, width in widths.items())
    yield linear("attention.out", shape.query_width, hidden)
    yield vectors("ffn_norm", hidden)
    yield from _gated_ffn("ffn", ("gate", "up", "down"), hidden, shape.ffn)


def _gated_ffn(path: str, names: tuple[str, ...], hidden: int, ffn: int, bias: bool = False) -> Iterator[Part]:
    """Yield the projections of a feed-forward; without a gate, if `names` has none."""
    *inward, outward = (f"{path}.{name}" for name in names)
    yield from (linear(name, hidden, ffn, bias) for name in inward)
    yield linear(outward, ffn, hidden, bias)


_GATED = ("gate_proj", "up_proj", "down_proj")


def _llama_block(shape: ModelShape) -> Iterator[Part]:
    hidden, ffn = shape.hidden, shape.ffn
    if shape.linear_value_heads:
        yield from _delta_net(shape)
    elif shape.kv_rank:
        yield from _latent_attention(shape)
    else:
        yield from _attention(shape)
    if shape.num_experts > 1:
        yield from _experts(shape)
    elif shape.fused_gate_up:
        yield linear("mlp.gate_up_proj", hidden, 2 * ffn, shape.bias)
        yield linear("mlp.down_proj", ffn, hidden, shape.bias)
    else:
        yield from _gated_ffn("mlp", _GATED if shape.gated else _GATED[1:], hidden, ffn, shape.bias)
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield from (vectors(name, hidden, shape.has_norm_biases) for name in names[: shape.num_norms])
    # gpt-oss: a sink for every head, and biases of the output, the router and the experts.
    per_expert = 1 + 2 * shape.ffn_of_expert + hidden
    sinks = shape.heads + hidden + shape.num_experts * per_expert if shape.has_sinks else 0
    yield from other(shape.other_elems + sinks)


def _attention(shape: ModelShape) -> Iterator[Part]:
    widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    made = {"qkv": sum(widths.values())} if shape.fused_qkv else widths
    made = {**made, "q": 2 * widths["q"]} if shape.gated_attention else made
    yield from (linear(f"self_attn.{name}_proj", shape.hidden, width, shape.qkv_bias) for name, width in made.items())
    yield linear("self_attn.o_proj", shape.query_width, shape.hidden, shape.bias)
    if shape.qk_norm or shape.qk_norm_whole:
        for name in "qk":
            width = shape.head_dim if shape.qk_norm else widths[name]
            yield vectors(f"self_attn.{name}_norm", width, shape.has_norm_biases)


def _latent_attention(shape: ModelShape) -> Iterator[Part]:
    if shape.q_rank:
        yield linear("self_attn.q_a_proj", shape.hidden, shape.q_rank)
        yield vectors("self_attn.q_a_layernorm", shape.q_rank)
        yield linear("self_attn.q_b_proj", shape.q_rank, shape.query_width)
    else:
        yield linear("self_attn.q_proj", shape.hidden, shape.query_width)
    yield linear("self_attn.kv_a_proj_with_mqa", shape.hidden, shape.kv_rank + shape.rope_dim)
    yield vectors("self_attn.kv_a_layernorm", shape.kv_rank)
    per_head = shape.head_dim - shape.rope_dim + shape.value_dim
    yield linear("self_attn.kv_b_proj", shape.kv_rank, shape.heads * per_head)
    yield linear("self_attn.o_proj", shape.heads * shape.value_dim, shape.hidden)


def _delta_net(shape: ModelShape) -> Iterator[Part]:
    """Yield Qwen3-Next's linear attention."""
    heads, (keys, values) = shape.linear_value_heads, shape.linear_widths
    yield Part("linear_attn", (("dt_bias", (heads,)), ("A_log", (heads,))))
    yield Part("linear_attn.conv1d", (("weight", (2 * keys + values, 1, 4)),))
    yield linear("linear_attn.in_proj_qkvz", shape.hidden, 2 * keys + 2 * values)
    yield linear("linear_attn.in_proj_ba", shape.hidden, 2 * heads)
    yield vectors("linear_attn.norm", shape.linear_dim)
    yield linear("linear_attn.out_proj", values, shape.hidden)


def _gpt_block(shape: ModelShape) -> Iterator[Part]:
    hidden, norm_bias = shape.hidden, shape.has_norm_biases
    yield vectors("ln_1", hidden, norm_bias)
    yield linear("attn.c_attn", hidden, shape.query_width + 2 * shape.kv_width, shape.qkv_bias, is_conv=True)
    yield linear("attn.c_proj", shape.query_width, hidden, shape.bias, is_conv=True)
    yield from (vectors(f"attn.{name}_norm", shape.head_dim, norm_bias) for name in "qk" if shape.qk_norm)
    if shape.num_norms > 1:
        yield vectors("ln_2", hidden, norm_bias)
    if shape.num_experts > 1:
        yield from _experts(shape)
    else:
        yield linear("mlp.c_fc", hidden, shape.ffn * (2 if shape.gated else 1), shape.bias, is_conv=True)
        yield linear("mlp.c_proj", shape.ffn, hidden, shape.bias, is_conv=True)
    yield from other(shape.other_elems)


def _experts(shape: ModelShape) -> Iterator[Part]:
    """Yield the router, and all experts in two tensors, as in transformers since version 5."""
    num, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn_of_expert
    router = Part("mlp.gate", (("weight", (num, hidden)),))
    inward, width = ("gate_up_proj", 2 * ffn) if shape.gated else ("up_proj", ffn)
    experts = Part("mlp.experts", ((inward, (num, width, hidden)), ("down_proj", (num, hidden, ffn))))
    # Qwen's order, with a gate for the shared expert, or DeepSeek's.
    yield from (router, experts) if shape.shared_gate or not shape.shared_ffn else (experts, router)
    if shape.shared_ffn:
        shared = "mlp.shared_expert" if shape.shared_gate else "mlp.shared_experts"
        yield from _gated_ffn(shared, _GATED, hidden, shape.shared_ffn)
    if shape.shared_gate:
        yield linear("mlp.shared_expert_gate", hidden, 1)


# The block, and the names of embedding, blocks, last norm and head.
_NAMING = {
    "in-tree": (_in_tree_block, "embed", "blocks", "norm", "head"),
    "llama": (_llama_block, "model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "gpt": (_gpt_block, "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
}
