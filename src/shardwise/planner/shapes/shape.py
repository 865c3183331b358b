"""A transformer as sizes, and the units that the real module of these sizes has.

`units_of` gives the same units as `find_units` on the module itself, names included, for the in-tree transformer and
for Llama, Mistral, Qwen3 and GPT-2 of transformers. Units of other families have the right sizes, but Llama's names
(GPT-2's, if positions are learned). Parameters that no field describes are counted in `other_elems`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, get_args

from ...base.dtypes import FP32, DType
from ...base.errors import ConfigurationError, did_you_mean, require_limits
from ...core.schedule.model import ROOT, Param, Site, UnitSpec, least_outside, parts_of
from ..training import Lora

Norm = Literal["rms", "rms-fp32", "layer"]
Residual = Literal["pre", "post", "parallel"]
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
    qk_norm_whole: bool = False  # ... all heads together
    residual: Residual = "pre"
    activation: str = ""
    fused_qkv: bool = False
    fused_gate_up: bool = False
    rotary_dim: int = 0
    attention: str = "flash"
    logits_capped: bool = False
    has_sinks: bool = False
    num_positions: int = 0  # number of learned positions
    num_experts: int = 1
    num_active_experts: int = 1
    expert_ffn: int = 0
    other_elems: int = 0  # further parameters of every block
    other_outside_elems: int = 0  # further parameters outside of blocks
    code: Code = "hf"
    dtype: DType = FP32

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
        for name, known in (("norm", get_args(Norm)), ("code", get_args(Code))):
            if (value := getattr(self, name)) not in known:
                yield f"{name} {str(value)!r}; {did_you_mean(str(value), known)}"
        if self.code == "in-tree":
            if self.query_width != self.hidden or self.head_dim % 2:
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
    def ffn_of_expert(self) -> int:
        """Width of one expert, or of the only feed-forward if there are no experts."""
        return (self.expert_ffn or self.ffn) if self.num_experts > 1 else self.ffn

    @cached_property
    def num_params(self) -> int:
        return _parts(self).num_elems

    @cached_property
    def num_matmul_params(self) -> int:
        """Parameters that a token is multiplied by: no embeddings, except a tied head; only the active experts."""
        looked_up = (0 if self.tied else self.vocab * self.hidden) + self.num_positions * self.hidden
        num_idle = self.num_experts - self.num_active_experts
        idle = self.layers * num_idle * (3 if self.gated else 2) * self.hidden * self.ffn_of_expert
        return self.num_params - looked_up - idle


MOST_OF_A_SIZE = 10**9
_LIMITS = {
    "layers": (1, 1_000),
    **dict.fromkeys(("hidden", "heads", "ffn", "vocab", "num_experts", "num_active_experts"), (1, MOST_OF_A_SIZE)),
    **dict.fromkeys(("kv_heads", "head_dim", "num_positions", "expert_ffn"), (0, MOST_OF_A_SIZE)),
    "num_norms": (1, 4),
    **dict.fromkeys(("other_elems", "other_outside_elems"), (0, 10**15)),
}
_SIZES = {
    "name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "norm_bias", "code", "dtype",
}  # fmt: skip
# Code whose blocks are all alike: what may differ in it, and values that it always has.
_HAS: dict[str, tuple[str, set[str], dict[str, object]]] = {
    "in-tree": ("the in-tree transformer", _SIZES, {}),
    "titan": ("torchtitan's Llama", {*_SIZES, "qk_norm"}, {}),
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
    """All parts of a model. `block`: those of one block, with relative paths. `block_paths`: paths of all blocks."""

    before: tuple[Part, ...]
    block: tuple[Part, ...]
    block_paths: tuple[str, ...]
    after: tuple[Part, ...]

    @property
    def num_block_elems(self) -> int:
        return sum(part.num_elems for part in self.block)

    @property
    def num_elems(self) -> int:
        outside = sum(part.num_elems for part in (*self.before, *self.after))
        outside -= sum(prod(part.params[0][1]) for part in self.after if part.is_tied)
        return outside + len(self.block_paths) * self.num_block_elems


def units_of(shape: ModelShape, lora: Lora | None = None) -> list[UnitSpec]:
    """Return the units of a module of this shape, with adapters in fp32 if `lora` is given."""
    return list(_units(shape, lora))


@lru_cache(maxsize=32)
def _units(shape: ModelShape, lora: Lora | None) -> tuple[UnitSpec, ...]:
    parts = _parts(shape)
    # `find_units` recognises blocks of transformers by class, and those of the in-tree model by repetition.
    splits_blocks = shape.code == "hf" or shape.layers > 1
    if lora is not None:
        parts = _with_adapters(parts, lora.r, targets_of(shape, lora))
    tied = next((Site(part.path, "weight") for part in parts.after if part.is_tied), None)
    least = least_outside(parts.num_block_elems) if splits_blocks else parts.num_elems + 1
    owned: dict[str, list[Param]] = {ROOT: []}

    def params_of(part: Part, path: str) -> list[Param]:
        trainable, dtype = lora is None or part.is_adapter, FP32 if part.is_adapter else shape.dtype
        return [
            Param(f"{path}.{attribute}", size, dtype, trainable, (Site(path, attribute),), part.is_embedding)
            for attribute, size in part.params
        ]

    def add_outside(group: tuple[Part, ...]) -> None:
        for part in group:
            params = params_of(part, part.path)
            if part.is_tied:
                del params[0]
            elif tied is not None and part is parts.before[0]:
                owned[ROOT].append(replace(params[0], sites=(*params[0].sites, tied)))
                del params[0]
            owned.setdefault(part.path if part.num_elems >= least else ROOT, []).extend(params)

    add_outside(parts.before)
    # A block is one unit, or one for each large part and one for the rest.
    in_block = ["", *_large_parts(parts.block)] if splits_blocks else []
    around = [[unit for unit in in_block if _is_in(part.path, unit)] for part in parts.block]
    owners = [max(units, key=len, default=None) for units in around]
    for path in parts.block_paths:
        names = {None: ROOT} | {unit: f"{path}.{unit}" if unit else path for unit in in_block}
        for name in names.values():
            owned.setdefault(name, [])
        for part, owner in zip(parts.block, owners, strict=True):
            owned[names[owner]] += params_of(part, f"{path}.{part.path}")
    add_outside(parts.after)
    owned = {name: params for name, params in owned.items() if params}
    holding = {ROOT} if len(owned) > 1 else set()
    holding |= set(parts.block_paths) if len(in_block) > 1 else set()
    return tuple(
        UnitSpec(
            name,
            "" if name == ROOT else name,
            tuple(params),
            name in holding,
            # Only the backward of an embedding does not read its weight.
            not all(param.is_table for param in params) or (name == ROOT and tied is not None),
        )
        for name, params in owned.items()
    )


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
    names = "in-tree" if shape.code == "in-tree" else "gpt" if shape.num_positions else "llama"
    make_block, words, blocks, norm, head = _NAMING[names]
    before = [Part(words, (("weight", (shape.vocab, shape.hidden)),), is_embedding=True)]
    if shape.num_positions:
        sizes = (("weight", (shape.num_positions, shape.hidden)),)
        before.append(Part("transformer.wpe", sizes, is_embedding=True))
    return Parts(
        before=tuple(before),
        block=tuple(make_block(shape, has_bias)),
        block_paths=tuple(f"{blocks}.{index}" for index in range(shape.layers)),
        after=(
            _vectors(norm, shape.hidden, has_bias),
            *_other(shape.other_outside_elems),
            _linear(head, shape.hidden, shape.vocab, shape.head_bias, is_tied=shape.tied),
        ),
    )


def _in_tree_block(shape: ModelShape, _: bool) -> Iterator[Part]:
    hidden = shape.hidden
    yield _vectors("attention_norm", hidden)
    widths = {"query": shape.query_width, "key": shape.kv_width, "value": shape.kv_width}
    yield from (_linear(f"attention.{name}", hidden, width) for name, width in widths.items())
    yield _linear("attention.out", shape.query_width, hidden)
    yield _vectors("ffn_norm", hidden)
    yield _linear("ffn.gate", hidden, shape.ffn)
    yield _linear("ffn.up", hidden, shape.ffn)
    yield _linear("ffn.down", shape.ffn, hidden)


def _llama_block(shape: ModelShape, norm_bias: bool) -> Iterator[Part]:
    hidden, ffn = shape.hidden, shape.ffn
    widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    if shape.fused_qkv:
        widths = {"qkv": sum(widths.values())}
    yield from (_linear(f"self_attn.{name}_proj", hidden, width, shape.qkv_bias) for name, width in widths.items())
    yield _linear("self_attn.o_proj", shape.query_width, hidden, shape.bias)
    if shape.qk_norm:
        yield _vectors("self_attn.q_norm", shape.head_dim, norm_bias)
        yield _vectors("self_attn.k_norm", shape.head_dim, norm_bias)
    if shape.qk_norm_whole:
        yield _vectors("self_attn.q_norm", shape.query_width, norm_bias)
        yield _vectors("self_attn.k_norm", shape.kv_width, norm_bias)
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


def _gpt_block(shape: ModelShape, norm_bias: bool) -> Iterator[Part]:
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


def _experts(shape: ModelShape) -> Iterator[Part]:
    """Yield the router, and all experts in two tensors, as in transformers since version 5."""
    num, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn_of_expert
    yield Part("mlp.gate", (("weight", (num, hidden)),))
    inward, width = ("gate_up_proj", 2 * ffn) if shape.gated else ("up_proj", ffn)
    yield Part("mlp.experts", ((inward, (num, width, hidden)), ("down_proj", (num, hidden, ffn))))


def _other(num_elems: int) -> Iterator[Part]:
    if num_elems:
        yield _vectors("other", num_elems)


# The block, and the names of embedding, blocks, last norm and head.
_NAMING = {
    "in-tree": (_in_tree_block, "embed", "blocks", "norm", "head"),
    "llama": (_llama_block, "model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "gpt": (_gpt_block, "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
}


def _with_adapters(parts: Parts, r: int, targets: Sequence[str]) -> Parts:
    """Add adapters, like peft, to every projection whose path ends in one of the targets."""
    example = f"{parts.block_paths[0]}."
    paths = [part.path for part in (*parts.before, *parts.after) if part.fan]
    paths += [example + part.path for part in parts.block if part.fan]
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

    block = tuple(new for part in parts.block for new in adapted(part, example))
    paths = [WRAPPER + path for path in parts.block_paths]
    return Parts(wrapped(parts.before), block, tuple(paths), wrapped(parts.after))


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
