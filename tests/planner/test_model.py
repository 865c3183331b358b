"""Which modules become units, and which unit each parameter travels with."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigurationError
from shardwise.core.schedule import model as limits
from shardwise.core.schedule.model import UnitSpec, matches
from shardwise.core.schedule.units import find_units
from tests.support.models import HUGGING_FACE, MODELS


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3, vocab: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, vocab, bias=False)


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


def owned(units: list[UnitSpec]) -> dict[str, str]:
    """Each parameter's unit."""
    return {param.name: unit.name for unit in units for param in unit.params}


def first_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


# ---------------------------------------------------------------------------------------------------------
# what is found


def test_the_entries_of_a_list_of_equal_blocks_are_units() -> None:
    units = find_units(Stack())
    assert names(units) == ["root", "layers.0", "layers.1", "layers.2"]
    assert [unit.path for unit in units] == ["", "layers.0", "layers.1", "layers.2"]
    assert [unit.holds_units for unit in units] == [True, False, False, False]
    assert [param.name for param in units[1].params] == [
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "layers.0.down.bias",
    ]


def test_what_no_unit_takes_stays_with_the_root() -> None:
    assert [param.name for param in find_units(Stack())[0].params] == ["embed.weight", "head.weight"]


def test_an_embedding_of_half_a_block_or_more_is_a_unit_of_its_own() -> None:
    block = sum(param.numel() for param in Block().parameters())
    assert names(find_units(Stack(vocab=block // 16))) == ["root", "layers.0", "layers.1", "layers.2"]
    assert names(find_units(Stack(vocab=block // 16 + 1))) == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]


def test_a_root_without_parameters_of_its_own_is_not_a_unit() -> None:
    assert "root" not in names(find_units(nn.Sequential(Block(), Block())))


def test_the_entries_of_a_sequence_with_a_repeated_class_are_units_each() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), Block(), nn.ReLU(), Block(), nn.Linear(8, 5))
    assert names(find_units(model)) == ["0", "1", "3", "4"]


def test_a_list_in_which_nothing_repeats_makes_no_units() -> None:
    assert names(find_units(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))) == ["root"]


def test_the_outermost_of_nested_lists_counts() -> None:
    model = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert names(find_units(model)) == ["0", "1"]


def test_blocks_without_parameters_are_no_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert names(find_units(model)) == ["0", "2"]


class Declared(nn.Module):
    """Like a Hugging Face model: says which classes must stay together."""

    _no_split_modules = ("Pair",)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.pairs = nn.ModuleDict({"a": Pair(), "b": Pair()})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def test_what_a_model_says_must_not_be_split_is_a_unit_and_repeated_blocks_are_not_looked_for() -> None:
    units = find_units(Declared())
    assert names(units) == ["root", "pairs.a", "pairs.b"]
    assert owned(units)["stem.0.weight"] == "root"


def test_a_wrapped_model_is_asked_as_well() -> None:
    wrapper = nn.Module()
    wrapper.inner = Declared()
    assert names(find_units(wrapper)) == ["root", "inner.pairs.a", "inner.pairs.b"]


def test_a_declaration_that_names_no_class_of_the_model_is_passed_over() -> None:
    class Outdated(Stack):
        _no_split_modules = ("GoneLayer",)

    assert names(find_units(Outdated())) == ["root", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_blocks_of_hugging_face_models_are_units(name: str) -> None:
    model = MODELS[name].fresh()
    blocks = {
        path for path, module in model.named_modules() if type(module).__name__ in set(model._no_split_modules or ())
    }
    assert blocks
    assert blocks <= set(names(find_units(model)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("units", ["auto", 1, 500, 10**9, ["Linear"]])
def test_every_parameter_has_one_unit_whatever_the_units(name: str, units: object) -> None:
    model = MODELS[name].fresh()
    if units == ["Linear"] and name in ("gpt2", "in-tree", "in-tree tied"):
        units = ["Conv1D"] if name == "gpt2" else ["Linear", "RMSNorm"]
    found = find_units(model, units)
    assert sorted(param.name for unit in found for param in unit.params) == sorted(first_names(model))
    modules = dict(model.named_modules())
    for unit in found:
        for param in unit.params:
            shapes = {modules[site.module]._parameters[site.attribute].shape for site in param.sites}
            assert shapes == {param.shape}


# ---------------------------------------------------------------------------------------------------------
# large blocks


class Expert(Block):
    pass


class Layer(nn.Module):
    """552 elements in each expert, 64 in attention, 24 besides."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8, bias=False)
        self.router = nn.Linear(8, 2, bias=False)
        self.norm = nn.RMSNorm(8)
        self.moe = nn.Module()
        self.moe.experts = nn.ModuleList(Expert() for _ in range(num_experts))


class Fused(nn.Module):
    """All experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8, bias=False)
        self.experts = nn.Module()
        self.experts.weights = nn.Parameter(torch.zeros(4, 8, 64))
        self.norm = nn.RMSNorm(8)


def layers(build: type[nn.Module]) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(build() for _ in range(2))
    return model


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGE_BLOCK", 1000)
    monkeypatch.setattr(limits, "LARGE_PART", 50)


@pytest.mark.usefixtures("low")
def test_a_large_block_gives_way_to_its_parts_and_keeps_what_is_small() -> None:
    units = find_units(layers(Layer))
    experts = [f"moe.experts.{index}" for index in range(4)]
    assert names(units) == [
        name
        for layer in ("layers.0", "layers.1")
        for name in (layer, *(f"{layer}.{part}" for part in ("attention", *experts)))
    ]
    assert [param.name for param in units[0].params] == ["layers.0.router.weight", "layers.0.norm.weight"]
    assert [unit.holds_units for unit in units] == [True, *[False] * 5] * 2


@pytest.mark.usefixtures("low")
def test_experts_in_one_tensor_stay_one_unit() -> None:
    assert names(find_units(layers(Fused)))[:3] == ["layers.0", "layers.0.attention", "layers.0.experts"]


def test_a_block_whose_parts_are_small_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else most of it would be gathered from the forward to the end of the backward."""
    monkeypatch.setattr(limits, "LARGE_BLOCK", 1000)
    monkeypatch.setattr(limits, "LARGE_PART", 600)
    assert names(find_units(layers(Layer))) == ["layers.0", "layers.0.moe", "layers.1", "layers.1.moe"]
    monkeypatch.setattr(limits, "LARGE_PART", 2500)
    assert names(find_units(layers(Layer))) == ["layers.0", "layers.1"]


@pytest.mark.usefixtures("low")
def test_a_part_that_two_blocks_share_is_one_unit() -> None:
    model = layers(Layer)
    model.layers[1].moe = model.layers[0].moe
    assert [name for name in names(find_units(model)) if "experts.0" in name] == ["layers.0.moe.experts.0"]
    assert sorted(owned(find_units(model))) == sorted(first_names(model))


def test_what_lies_outside_the_blocks_is_a_unit_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "embed" not in names(find_units(Stack()))
    monkeypatch.setattr(limits, "LARGE_PART", 32)
    assert names(find_units(Stack())) == ["embed", "layers.0", "layers.1", "layers.2", "head"]


LARGE: dict[str, tuple[dict[str, Any], str, float]] = {
    "deepseek_v3": ({"num_hidden_layers": 5}, "model.layers.3.mlp.experts", 11.3e9),
    "llama4_text": ({"num_hidden_layers": 2, "num_local_experts": 128}, "model.layers.0.feed_forward.experts", 16.2e9),
    "mixtral": ({"num_hidden_layers": 2, "hidden_size": 6144, "intermediate_size": 16384}, "model.layers.0", 2.6e9),
    "gpt_oss": ({"num_hidden_layers": 2}, "model.layers.0", 3.3e9),
    "llama": ({"num_hidden_layers": 2, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
               "intermediate_size": 28672}, "model.layers.0", 0.9e9),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_large_models_of_transformers_leave_next_to_nothing_in_the_root(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    values, largest, most = LARGE[kind]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values))
    sizes = {unit.name: sum(param.num_elems for param in unit.params) for unit in find_units(model)}
    assert max(sizes, key=lambda name: sizes[name]) == largest
    assert sizes[largest] < most
    assert {"model.embed_tokens", "lm_head"} <= set(sizes)
    assert sum(sizes[unit.name] for unit in find_units(model) if unit.holds_units) < 5e6 * values["num_hidden_layers"]


# ---------------------------------------------------------------------------------------------------------
# what is asked for


def test_units_by_class_name_and_by_class() -> None:
    expected = ["root", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]
    assert names(find_units(Stack(2), ["Linear"])) == expected
    assert names(find_units(Stack(2), [nn.Linear])) == expected


def test_units_inside_units() -> None:
    units = find_units(Stack(2), ["Block", "Linear"])
    assert names(units) == [
        "root",
        "layers.0.up",
        "layers.0.down",
        "layers.1.up",
        "layers.1.down",
        "head",
    ], "a block whose parameters all lie in deeper units has none of its own"

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

    model = nn.Sequential(Normed(), Normed())
    units = find_units(model, ["Normed", "Linear"])
    assert names(units) == ["0", "0.up", "0.down", "1", "1.up", "1.down"]
    assert owned(units)["0.scale"] == "0"
    assert [unit.holds_units for unit in units] == [True, False, False, True, False, False]


def test_an_unknown_class_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigurationError, match=r"no module of class 'Blok'; did you mean 'Block'\?"):
        find_units(Stack(), ["Blok"])


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'auto'"):
        find_units(Stack(), "atuo")


def test_a_single_class_name_is_told_to_be_a_list() -> None:
    with pytest.raises(ConfigurationError, match="a list of class names"):
        find_units(Stack(), "Block")


@pytest.mark.parametrize("threshold", [0, -5])
def test_a_threshold_below_one_is_refused(threshold: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        find_units(Stack(), threshold)


def test_a_size_threshold_cuts_from_the_bottom() -> None:
    model = Stack(2)
    linear, block = 8 * 32 + 32, 8 * 32 + 32 + 32 * 8 + 8
    assert names(find_units(model, block + 1)) == ["root"]
    assert names(find_units(model, linear + 1)) == ["root", "layers.0", "layers.1"]
    # `up` reaches 288 and is a unit; `down`, 264 without it, does not and goes up to the root.
    assert names(find_units(model, linear)) == ["root", "layers.0.up", "layers.1.up"]


@pytest.mark.parametrize("threshold", [1, 100, 265, 289, 600, 10**6])
def test_every_unit_but_the_root_reaches_the_threshold(threshold: int) -> None:
    for unit in find_units(Stack(), threshold):
        if unit.name != "root":
            assert sum(param.num_elems for param in unit.params) >= threshold


# ---------------------------------------------------------------------------------------------------------
# parameters with several names


def test_a_tied_parameter_belongs_to_the_nearest_unit_above_its_uses() -> None:
    model = Stack(vocab=100)
    model.head.weight = model.embed.weight
    units = find_units(model)
    assert owned(units)["embed.weight"] == "root"
    tied = next(param for unit in units for param in unit.params if param.name == "embed.weight")
    assert [site.name for site in tied.sites] == ["embed.weight", "head.weight"]
    assert sum(len(unit.params) for unit in units) == len(list(model.parameters()))


def test_nearest_is_not_the_root_where_a_unit_lies_between() -> None:
    model = nn.Sequential(Pair(), Pair())
    model[0].blocks[0].up.weight = model[0].blocks[1].up.weight
    units = find_units(model, ["Pair", "Block"])
    assert owned(units)["0.blocks.0.up.weight"] == "0"
    assert "root" not in names(units)
    model[1].blocks[0].up.bias = model[0].blocks[0].up.bias
    assert owned(find_units(model, ["Pair", "Block"]))["0.blocks.0.up.bias"] == "root"


def test_a_parameter_used_twice_inside_one_unit_stays_there() -> None:
    model = nn.Sequential(Pair(), Pair())
    model[0].blocks[0].up.weight = model[0].blocks[1].up.weight
    assert owned(find_units(model, ["Pair"]))["0.blocks.0.up.weight"] == "0"


def test_names_that_begin_alike_are_not_inside_one_another() -> None:
    model = nn.Module()
    model.block = Block()
    model.block_2 = Block()
    model.block.up.weight = model.block_2.up.weight
    assert owned(find_units(model, ["Block"]))["block.up.weight"] == "root"


def test_a_module_under_two_names_is_one_unit() -> None:
    model = Stack(2)
    model.again = model.layers[0]
    units = find_units(model, ["Block"])
    assert names(units) == ["root", "layers.0", "layers.1"]


# ---------------------------------------------------------------------------------------------------------
# what a parameter is


def test_dtype_and_trainability_are_recorded() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    params = [param for unit in find_units(model) for param in unit.params]
    assert [(param.dtype.torch, param.trainable) for param in params] == [(torch.float64, False)] * 2 + [
        (torch.bfloat16, True)
    ] * 2


def test_a_parameter_that_is_not_floating_point_is_in_no_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].table = nn.Parameter(torch.arange(3), requires_grad=False)
    assert "1.table" not in owned(find_units(model))
    model[1].turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match=r"'1\.turn' is trained and is torch\.complex64"):
        find_units(model)


def test_parameters_in_lists_are_found() -> None:
    model = nn.Module()
    model.bank = nn.ParameterList([torch.ones(2), torch.ones(3)])
    model.named = nn.ParameterDict({"a": torch.ones(4)})
    assert sorted(owned(find_units(model))) == ["bank.0", "bank.1", "named.a"]


def patterns() -> Iterator[tuple[str, list[str], bool]]:
    yield "layers.0.norm", ["*norm"], True
    yield "layers.0.norm.inner", ["*.norm"], True  # inside a module that matches
    yield "layers.0.normal", ["*.norm"], False
    yield "layers.0", ["layers.1", "layers.0"], True
    yield "layers.10", ["layers.1"], False
    yield "layers", [], False


@pytest.mark.parametrize(("name", "given", "expected"), list(patterns()))
def test_patterns_match_a_module_or_one_around_it(name: str, given: list[str], expected: bool) -> None:
    assert matches(name, given) is expected
