"""What `--offload` and `--wire` say: changes behind every name of a strategy, and one folder."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layout_of
from shardwise.trainer.offload import Offload, check_strategy, is_auto, offload_of

ALL = ("optimizer=host:0.6", "params=disk:/nvme", "grads=host", "activations=host")


def test_moves_and_a_folder() -> None:
    offload = offload_of(ALL)
    assert offload == Offload(("optimizer=host:0.6", "params=disk", "grads=host", "activations=host"), Path("/nvme"))
    asked = offload.applied_to("zero3")
    assert isinstance(asked, str)
    layout = layout_of(asked)
    assert (layout.optimizer_on, layout.kept, layout.params_on) == ("host", 0.4, "disk")
    assert (layout.grads_on, layout.activations_on) == ("host", "host")


@pytest.mark.parametrize(
    ("words", "moves", "folder"),
    [
        ((), (), None),
        (("disk:/nvme",), (), "/nvme"),
        (("optimizer=disk:0.5:/nvme",), ("optimizer=disk:0.5",), "/nvme"),
        (("optimizer=disk:0.5", "disk:/nvme"), ("optimizer=disk:0.5",), "/nvme"),
        (("params=disk:/nvme", "optimizer=disk:/nvme"), ("params=disk", "optimizer=disk"), "/nvme"),
        (("params=Disk:/a:b",), ("params=disk",), "/a:b"),
        (("params=disk:./0.5",), ("params=disk",), "0.5"),
        (("optimizer=device",), ("optimizer=device",), None),
    ],
)
def test_every_spelling(words: tuple[str, ...], moves: tuple[str, ...], folder: str | None) -> None:
    assert offload_of(words) == Offload(moves, None if folder is None else Path(folder))


def test_a_home_folder_is_found() -> None:
    assert offload_of(["disk:~/state"]).folder == Path("~/state").expanduser()


def test_every_entry_of_a_mapping_is_moved() -> None:
    mapping = {"blocks.0": "ddp", "*": "zero3"}
    moved = offload_of(["optimizer=host"]).applied_to(mapping)
    assert moved == {"blocks.0": "ddp+optimizer=host", "*": "zero3+optimizer=host"}
    check_strategy(mapping, ["optimizer=host"])
    with pytest.raises(ConfigurationError, match="'ddp\\+params=host\\+optimizer=host', with what was changed"):
        check_strategy(mapping, ["params=host", "optimizer=host"])


def test_a_preset_may_be_moved_elsewhere() -> None:
    words = ["params=device", "optimizer=host:0.5"]
    check_strategy("zero3-offload", words)
    asked = offload_of(words).applied_to("zero3-offload")
    assert isinstance(asked, str)
    assert layout_of(asked) == layout_of("zero3+grads=host+optimizer=host:0.5")


def test_auto_takes_moves_and_a_folder() -> None:
    for words in (["disk:/nvme"], ["optimizer=host"], ["params=host", "optimizer=disk:/nvme"], []):
        check_strategy("auto", words)
        assert is_auto(offload_of(words).applied_to("auto"))
    check_strategy("Auto+optimizer=host", [])
    with pytest.raises(ConfigurationError, match="no folder is named"):
        check_strategy("auto", ["optimizer=disk"])
    assert not is_auto({"*": "auto"})


def test_codecs_of_the_wire() -> None:
    asked = offload_of(["optimizer=host:0.5"], ["params=int8", "grads=int4:128:feedback"]).applied_to("zero3")
    assert asked == "zero3+optimizer=host:0.5+params_as=int8+grads_as=int4:128:feedback"
    assert isinstance(asked, str)
    layout = layout_of(asked)
    assert (layout.params_as, layout.grads_as, layout.optimizer_on) == ("int8", "int4:128:feedback", "host")
    assert layout.name == asked
    check_strategy("auto", [], ["grads=bf16"])
    check_strategy("auto", [], ["params=int8:forward"])
    assert offload_of([], ["params=int8:forward"]).applied_to("hsdp") == "hsdp+params_as=int8:forward"
    with pytest.raises(ConfigurationError, match=r"'zero2\+params_as=int8:forward', with .* gathered_until='always'"):
        check_strategy("zero2", [], ["params=int8:forward"])
    check_strategy({"blocks.0": "ddp", "*": "zero3"}, [], ["grads=int8"])


@pytest.mark.parametrize(
    ("strategy", "wire", "words"),
    [
        ("zero3", "int8", "'int8' names no format; write params=int8"),
        ("zero3", "params=", "'params=' names no format"),
        ("zero3", "params=int4", "with what was changed .*16 values are too few"),
        ("zero3", "optimizer=int8", "'optimizer' cannot be encoded"),
        ("ddp", "params=int8", "parameters that every rank updates are never sent"),
        ("zero3", "grads=int9", "unknown kind 'int9'"),
    ],
)
def test_wires_that_cannot_be(strategy: str, wire: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_strategy(strategy, [], [wire])
