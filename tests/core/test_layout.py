"""The table: names, aliases, and every combination of answers either builds or is refused with both values named."""

from dataclasses import astuple, replace
from itertools import product
from typing import get_args

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import ALIASES, OFFLOADS, PRESETS, SPLITS, Layout, Split, Until, layout_of, layouts_for

UNITS = ["root", "embed", "blocks.0", "blocks.1", "blocks.10"]


def test_the_table() -> None:
    """The presets as the documents define them: params, grads, optimizer, gathered until."""
    assert {name: astuple(layout)[:4] for name, layout in PRESETS.items()} == {
        "ddp": ("whole", "whole", "whole", "always"),
        "zero1": ("whole", "whole", "world", "always"),
        "zero2": ("whole", "world", "world", "always"),
        "shard_grad_op": ("world", "world", "world", "backward"),
        "zero3": ("world", "world", "world", "forward"),
        "hsdp": ("node", "node", "node", "forward"),
        "hybrid_shard_zero2": ("node", "node", "node", "backward"),
        "hfsdp": ("node", "node", "world", "forward"),
        "hpz": ("node", "world", "world", "forward"),
        "zero2_offload": ("whole", "world", "world", "always"),
        "zero3_offload": ("world", "world", "world", "forward"),
        "zero3_nvme": ("world", "world", "world", "forward"),
        "zeropp": ("node", "world", "world", "forward"),
    }
    assert {name: astuple(layout)[4:8] for name, layout in PRESETS.items() if layout.uses_host} == {
        "zero2_offload": ("device", "host", "host", "device"),
        "zero3_offload": ("host", "host", "host", "device"),
        "zero3_nvme": ("disk", "host", "disk", "device"),
    }
    assert {name: layout.codecs for name, layout in PRESETS.items() if not layout.is_exact} == {
        "zeropp": ["params_as=int8", "grads_as=int4"]
    }


def test_presets_differ() -> None:
    assert len(set(PRESETS.values())) == len(PRESETS)


@pytest.mark.parametrize(
    ("alias", "preset"),
    [
        ("no_shard", "ddp"),
        ("NO_SHARD", "ddp"),
        ("fsdp", "zero3"),
        ("full_shard", "zero3"),
        ("hybrid_shard", "hsdp"),
        ("hybrid-shard", "hsdp"),
        ("mics", "hsdp"),
        ("MiCS", "hsdp"),
        ("shard-grad-op", "shard_grad_op"),
        ("ZeRO3", "zero3"),
        ("ZeRO++", "zeropp"),
    ],
)
def test_aliases(alias: str, preset: str) -> None:
    assert layout_of(alias) == PRESETS[preset]


def test_every_alias_leads_to_a_preset() -> None:
    assert set(ALIASES.values()) <= set(PRESETS)
    assert not set(ALIASES) & set(PRESETS)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("zero4", "zero"),
        ("zer3", "zero3"),
        ("fdsp", "fsdp"),
        ("hsdpp", "hsdp"),
        ("dpp", "ddp"),
        ("full_shards", "full_shard"),
    ],
)
def test_did_you_mean(asked: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"unknown strategy '{asked}'; did you mean '{meant}"):
        layout_of(asked)


def test_a_word_like_no_other_lists_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown strategy 'qqqq'; known: .*ddp.*zero3"):
        layout_of("qqqq")


@pytest.mark.parametrize("field", ["params", "grads", "optimizer", "gathered_until"])
def test_an_unknown_answer_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{field}='wrld'"):
        Layout(**{field: "wrld"})
    with pytest.raises(ConfigurationError, match=r"did you mean 'world'"):
        Layout(optimizer="wrld")


def makes_sense(params: Split, grads: Split, optimizer: Split, until: Until) -> bool:
    """Nothing is split further than the optimizer, which needs it; and whole is what is always gathered."""
    order = {"whole": 0, "node": 1, "world": 2}
    not_wider = order[params] <= order[optimizer] and order[grads] <= order[optimizer]
    return not_wider and (params == "whole") == (until == "always")


@pytest.mark.parametrize("answers", list(product(SPLITS, SPLITS, SPLITS, get_args(Until))), ids="-".join)
def test_every_combination(answers: tuple[Split, Split, Split, Until]) -> None:
    if makes_sense(*answers):
        layout = Layout(*answers)
        assert layout.depth("whole") == 0
        depths = [layout.depth(split) for split in (layout.params, layout.grads, layout.optimizer)]
        assert max(depths) <= len(layout.chain)
        # A split over the world goes along every axis of the chain, whatever the chain.
        assert layout.depth("world") == len(layout.chain)
        return
    with pytest.raises(ConfigurationError) as caught:
        Layout(*answers)
    message = str(caught.value)
    # One sentence that names two fields with their values.
    named = [
        field
        for field, value in zip(("params", "grads", "optimizer", "gathered_until"), answers, strict=True)
        if f"{field}={value!r}" in message
    ]
    assert len(named) == 2, message


def test_how_many_make_sense() -> None:
    combinations = list(product(SPLITS, SPLITS, SPLITS, get_args(Until)))
    assert len(combinations) == 81
    # optimizer whole: 1; node: 2 grads x (whole + node twice); world: 3 grads x (whole + node and world twice)
    assert sum(makes_sense(*answers) for answers in combinations) == 1 + 2 * 3 + 3 * 5


def test_a_chain_stops_at_the_node_only_where_something_does() -> None:
    assert PRESETS["zero3"].chain == ("world",)
    assert PRESETS["ddp"].chain == ("world",)
    assert PRESETS["hsdp"].chain == ("node", "replicate")
    assert PRESETS["hpz"].chain == ("node", "replicate")


def test_a_layout_prints_its_name_and_its_answers() -> None:
    assert str(PRESETS["zero3"]) == ("zero3 (params world, grads world, optimizer world, gathered_until forward)")
    assert str(Layout("whole", "node", "world", "always")).startswith("custom (")


# ---------------------------------------------------------------------------------------------------------
# where it rests


@pytest.mark.parametrize(
    ("asked", "answers", "name"),
    [
        ("zero3+optimizer=host", {"optimizer_on": "host"}, "zero3+optimizer=host"),
        ("ZeRO2-Offload", {"grads_on": "host", "optimizer_on": "host"}, "zero2_offload"),
        ("zero2+grads=host+optimizer=host", {"grads_on": "host", "optimizer_on": "host"}, "zero2_offload"),
        ("fsdp+optimizer=host:0.6", {"optimizer_on": "host", "kept": 0.4}, "zero3+optimizer=host:0.6"),
        (
            "zero3_offload+optimizer=host:0.25",
            {"params_on": "host", "grads_on": "host", "optimizer_on": "host", "kept": 0.75},
            "zero3+params=host+grads=host+optimizer=host:0.25",
        ),
        (
            "zero3+params=disk+optimizer=host:1",
            {"params_on": "disk", "optimizer_on": "host", "kept": 0.0},
            "zero3+params=disk+optimizer=host",
        ),
        ("ddp+activations=host", {"activations_on": "host"}, "ddp+activations=host"),
        ("zero3_nvme+params=host", {"params_on": "host", "optimizer_on": "disk"}, None),
        ("zero++", {"params_as": "int8"}, "zeropp"),
    ],
)
def test_what_rests_elsewhere_follows_the_name(asked: str, answers: dict[str, object], name: str | None) -> None:
    layout = layout_of(asked)
    assert {field: getattr(layout, field) for field in answers} == answers
    if name is not None:
        assert layout.name == name
    # The name is what `--strategy` takes for it.
    assert layout_of(layout.name) == layout


@pytest.mark.parametrize("name", [*OFFLOADS, *PRESETS])
def test_every_name_is_read_as_what_it_says(name: str) -> None:
    for percent in range(0, 100, 7):
        layout = layout_of(name)
        if layout.optimizer_on != "device":
            layout = replace(layout, kept=percent / 100)
        assert layout_of(layout.name) == layout


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("zero3+optimiser=host", "'optimiser' cannot be moved; did you mean 'optimizer'"),
        ("zero3+optimizer=hots", "'hots' is no place; did you mean 'host'"),
        ("zero3+optimizer=host+optimizer=disk", "moved to 'host' already"),
        ("zero3+optimizer=host:1.5", "above 0 and at most 1"),
        ("zero3+optimizer=host:0", "above 0 and at most 1"),
        ("zero3+optimizer=host:half", "above 0 and at most 1"),
        ("zero3_offload+params=host:0.5", "goes with the optimizer alone"),
        ("zero3+params=host", "params_on='host' with optimizer_on='device'"),
        ("zero2+params=host+optimizer=host", "params_on='host' with gathered_until='always'"),
        ("zero3+grads=host", "grads_on='host' with optimizer_on='device'"),
        ("zero3+grads=disk+optimizer=disk", "grads_on='disk' with optimizer_on='disk'"),
        ("zero3+activations=disk", "activations go to the host"),
        ("zero4+optimizer=host", "did you mean 'zero"),
    ],
)
def test_what_cannot_rest_so_is_refused(asked: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        layout_of(asked)
    assert told in str(caught.value)


def test_a_part_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"kept=0.5 with optimizer_on='device'"):
        replace(PRESETS["zero3"], kept=0.5)
    with pytest.raises(ConfigurationError, match=r"kept=1.0 with optimizer_on='host'"):
        replace(PRESETS["zero3"], optimizer_on="host", kept=1.0)


def test_what_needs_a_host_and_what_a_disk() -> None:
    assert not any(PRESETS[name].uses_host for name in ("ddp", "zero3", "hpz"))
    assert layout_of("ddp+activations=host").uses_host
    assert [name for name, layout in PRESETS.items() if layout.uses_disk] == ["zero3_nvme"]


# ---------------------------------------------------------------------------------------------------------
# one layout for each unit


def test_one_strategy_is_every_units() -> None:
    assert layouts_for("zero3", UNITS) == [PRESETS["zero3"]] * len(UNITS)
    own = Layout("whole", "node", "world", "always")
    assert layouts_for(own, UNITS) == [own] * len(UNITS)


def test_the_first_pattern_that_matches_counts() -> None:
    found = layouts_for({"blocks.0": "ddp", "blocks.*": "zero3", "*": "zero2"}, UNITS)
    assert found == [PRESETS[name] for name in ("zero2", "zero2", "ddp", "zero3", "zero3")]


def test_a_pattern_without_a_unit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'block.0' matches no unit; did you mean 'blocks.0'"):
        layouts_for({"block.0": "ddp", "*": "zero3"}, UNITS)


def test_a_unit_without_a_pattern_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no pattern matches unit 'root'.*'\*'"):
        layouts_for({"blocks.*": "ddp", "embed": "zero3"}, UNITS)


def test_a_bad_name_in_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown strategy 'zero33'; did you mean 'zero3'"):
        layouts_for({"*": "zero33"}, UNITS)


def test_auto_is_for_the_whole_model() -> None:
    with pytest.raises(ConfigurationError, match="auto") as caught:
        layouts_for({"*": "auto"}, UNITS)
    assert "did you mean 'auto'" not in str(caught.value)


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a Layout or a mapping.*not int"):
        layouts_for(3, UNITS)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a Layout.*not int"):
        layouts_for({"*": 3}, UNITS)  # type: ignore[dict-item]
