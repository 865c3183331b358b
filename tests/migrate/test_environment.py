"""What `accelerate launch` leaves in the environment is the file that it was given."""

from pathlib import Path
from typing import Any

import pytest

import shardwise.migrate.api as api
from shardwise.migrate.accelerate import read_environment

FIXTURES = Path(__file__).parent / "fixtures" / "accelerate"


def launched(path: Path) -> dict[str, str]:
    """What Accelerate itself sets for a rank, of what it sets itself."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", "script.py"])
    args.nondefault = set()
    args, _, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    made: Any = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


@pytest.mark.peers
@pytest.mark.parametrize(
    "name",
    ["accelerate_fsdp", "accelerate_hsdp", "accelerate_grad_op", "trl_fsdp1", "trl_fsdp2", "trl_fsdp_qlora"],
)
def test_a_rank_finds_what_the_file_says(name: str) -> None:
    path = FIXTURES / f"{name}.yaml"
    by_file, by_environment = api.read(path), read_environment(launched(path))
    assert by_environment is not None
    assert not by_environment.refused
    assert by_environment.words == by_file.words
    for key in ("gradient_checkpointing", "compile", "export"):
        assert by_environment.settings.get(key) == by_file.settings.get(key)


@pytest.mark.parametrize(
    "environ", [{}, {"PATH": "/bin"}, {"ACCELERATE_MIXED_PRECISION": "no"}, {"ACCELERATE_USE_FSDP": "false"}]
)
def test_nothing_about_sharding_is_nothing(environ: dict[str, str]) -> None:
    assert read_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "strategy", "refused"),
    [
        ({}, "zero3", []),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "ddp", []),
        ({"FSDP_SHARDING_STRATEGY": "4", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "hsdp", []),
        (
            {"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            "shard_grad_op",
            [],
        ),
        (
            {"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_RESHARD_AFTER_FORWARD": "true"},
            "shard_grad_op",
            [],
        ),
        ({"FSDP_IGNORED_MODULES": "head"}, "zero3", ["FSDP_IGNORED_MODULES"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "zero3", ["ACCELERATE_MIXED_PRECISION"]),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "zero3", ["PARALLELISM_CONFIG_TP_SIZE"]),
    ],
)  # fmt: skip
def test_variables(environ: dict[str, str], strategy: str, refused: list[str]) -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", "HOME": "/", **environ}
    migrated = read_environment(environ)
    assert migrated is not None
    assert migrated.strategy == strategy
    assert [entry.key for entry in migrated.refused] == refused
    assert {entry.key for entry in migrated.entries} == set(environ) - {"HOME"}


def test_unknown_variables_are_told_and_left_alone() -> None:
    migrated = read_environment({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_LOG_LEVEL": "info", "FSDP_FOO": "1"})
    assert migrated is not None
    fates = {entry.key: entry.fate for entry in migrated.entries}
    assert fates == {"ACCELERATE_USE_FSDP": "used", "ACCELERATE_LOG_LEVEL": "ignored", "FSDP_FOO": "ignored"}


def test_megatron_is_refused() -> None:
    migrated = read_environment({"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"})
    assert migrated is not None
    assert next(entry.key for entry in migrated.refused) == "ACCELERATE_USE_MEGATRON_LM"


def test_plain_ranks_have_a_precision_and_no_strategy() -> None:
    found = read_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "false"})
    assert found is not None
    assert found.settings == {"strategy": "auto", "precision": "bf16"}
    assert [entry.key for entry in found.entries] == ["ACCELERATE_MIXED_PRECISION"]
    assert read_environment({"ACCELERATE_MIXED_PRECISION": "no"}) is None
    refused = read_environment({"ACCELERATE_MIXED_PRECISION": "fp8"})
    assert refused is not None
    assert refused.refused
