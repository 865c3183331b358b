"""Accelerate's YAML: examples of Accelerate, TRL and LLaMA-Factory with the same keys, and what every key becomes."""

from pathlib import Path
from typing import Any

import pytest

import shardwise.migrate.api as api
from shardwise.base.documents import yaml_tree
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layout_of
from shardwise.migrate.migrated import Migrated
from shardwise.trainer.config import resolve
from tests.migrate.told import assert_all_told

FIXTURES = Path(__file__).parent / "fixtures" / "accelerate"
HOST = "zero3+params=host+grads=host+optimizer=host"
LAUNCHED = {"nnodes": "1", "nproc_per_node": 8}
SUMS_IN_BF16 = {"precision": "bf16", "reduce_dtype": "bf16"}
# The strategy, settings besides it, units, and keys that are refused.
EXPECTED: dict[str, tuple[str, dict[str, Any], Any, tuple[str, ...]]] = {
    "accelerate_one_device": ("ddp", {"precision": "fp32", "nproc_per_node": 1}, (), ()),
    "accelerate_multi_gpu": ("ddp", {"precision": "bf16", "nproc_per_node": 4}, (), ()),
    "accelerate_multi_node": (
        "ddp",
        {"precision": "fp16", "nproc_per_node": 8, "nnodes": "4", "node_rank": 2, "rdzv_endpoint": "node-a:5555"},
        (),
        (),
    ),
    "accelerate_fsdp": ("zero3", SUMS_IN_BF16 | {"export": False}, ("2000000",), ()),
    "accelerate_deepspeed": ("zero2+grads=host+optimizer=host", {"precision": "bf16"}, (), ()),
    "accelerate_fp8": ("ddp", {}, (), ("mixed_precision",)),
    "accelerate_multi_xpu": ("ddp", {}, (), ("distributed_type",)),
    "accelerate_slurm_fsdp": (
        "zero3", {"precision": "fp32", "gradient_checkpointing": "full", "export": True}, (), (),
    ),
    "accelerate_hsdp_tp": ("hsdp", {}, (), ("parallelism_config.parallelism_config_tp_size",)),
    "accelerate_hsdp": ("hsdp", {"node_size": 4, "nproc_per_node": 8}, (), ()),
    "accelerate_cp": ("zero3", {}, (), ("parallelism_config.parallelism_config_cp_size",)),
    "accelerate_fsdp2_ao": ("zero3+params_as=e4m3", {"export": True}, (), ()),
    "accelerate_hybrid": (
        "hsdp",
        {"precision": "fp16", "nproc_per_node": 8, "nnodes": "2", "node_rank": 1, "rdzv_backend": "static"},
        ("BertLayer", "GPT2Block"),
        (),
    ),
    "accelerate_no_shard": ("ddp", {"precision": "fp32", "device": "cpu"}, (), ()),
    "accelerate_grad_op": ("shard_grad_op", SUMS_IN_BF16 | {"compile": "on"}, ("LlamaDecoderLayer",), ()),
    "trl_single_gpu": ("ddp", {"precision": "bf16", "nproc_per_node": 1}, (), ()),
    "trl_multi_gpu": ("ddp", {"precision": "bf16", **LAUNCHED}, (), ()),
    "trl_zero1": ("zero1", {"precision": "bf16", **LAUNCHED}, (), ()),
    "trl_zero2": ("zero2", {"precision": "bf16", **LAUNCHED}, (), ()),
    "trl_zero3": ("zero3", {"precision": "bf16", **LAUNCHED}, (), ()),
    "trl_fsdp1": ("zero3", SUMS_IN_BF16 | LAUNCHED | {"export": True}, (), ()),
    "trl_fsdp2": ("zero3", SUMS_IN_BF16 | LAUNCHED | {"export": False}, (), ()),
    "trl_fsdp_qlora": (HOST, SUMS_IN_BF16 | LAUNCHED, (), ()),
    "trl_alst": (
        "zero3",
        {},
        (),
        ("parallelism_config.parallelism_config_dp_shard_size", "parallelism_config.parallelism_config_cp_size"),
    ),
    "llama_factory_fsdp_offload": (HOST, {"precision": "fp16", "export": True}, (), ()),
    "llama_factory_fsdp2": ("shard_grad_op", SUMS_IN_BF16, (), ()),
    "llama_factory_two_machines": (
        "zero3",
        {"precision": "bf16", "nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "192.168.0.1:29555"},
        (),
        (),
    ),
}  # fmt: skip


def read(**keys: Any) -> Migrated:
    return api.read({"distributed_type": "FSDP", **keys}, "accelerate")


def fate(migrated: Migrated, key: str) -> tuple[str, str]:
    entry = next(entry for entry in migrated.entries if entry.key == key)
    return entry.fate, entry.text


def test_every_fixture_is_expected_something_of() -> None:
    assert {path.stem for path in FIXTURES.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_examples(name: str) -> None:
    strategy, settings, units, refused = EXPECTED[name]
    path = FIXTURES / f"{name}.yaml"
    migrated = api.read(path)
    assert migrated.kind == "accelerate"
    assert tuple(entry.key for entry in migrated.refused) == refused, migrated.refused
    assert layout_of(migrated.strategy) == layout_of(strategy)
    assert {key: migrated.settings[key] for key in settings} == settings
    assert migrated.settings.get("units", ()) == units
    assert_all_told(yaml_tree(path.read_text(), name, 12), migrated)
    if not refused:
        resolve([], {}, {}, others={"file": migrated.settings})
        assert api.from_accelerate(path).words["strategy"] == migrated.strategy


def test_no_kind_no_configuration() -> None:
    with pytest.raises(ConfigurationError, match="distributed_type is missing"):
        api.read({"num_processes": 2}, "accelerate")


def test_a_refusal_names_every_key_in_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"gpu_ids 2,3: .*CUDA_VISIBLE_DEVICES=2,3.*; fsdp_config.fsdp_offlod"):
        api.from_accelerate({"distributed_type": "FSDP", "gpu_ids": "2,3", "fsdp_config": {"fsdp_offlod_params": True}})


@pytest.mark.parametrize(
    ("keys", "refused", "text"),
    [
        ({"num_processes": 5, "num_machines": 2}, "num_processes", "not a multiple of num_machines 2"),
        ({"num_processes": 0}, "num_processes", "must be at least 1"),
        ({"num_processes": "many"}, "num_processes", "not a whole number"),
        ({"num_processes": [2]}, "num_processes", "is a list"),
        ({"mixed_precision": "bf17"}, "mixed_precision", "did you mean 'bf16'"),
        ({"mixed_precison": "bf16"}, "mixed_precison", "did you mean 'mixed_precision'"),
        ({"main_process_port": 99999999, "num_machines": 2}, "main_process_port", "at most 65535"),
        ({"fsdp_config": "full"}, "fsdp_config", "not a mapping"),
        ({"dynamo_config": {"dynamo_backend": "TVM"}}, "dynamo_config.dynamo_backend", "INDUCTOR only"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment", "SageMaker"),
        ({"tpu_use_cluster": True}, "tpu_use_cluster", "no TPUs"),
        ({"megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "megatron_lm_config", "Megatron-LM splits layers"),
        ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpirun_config.mpirun_hostfile", "not started by MPI"),
    ],
)  # fmt: skip
def test_refused(keys: dict[str, Any], refused: str, text: str) -> None:
    migrated = read(**keys)
    assert [entry.key for entry in migrated.refused] == [refused]
    assert text in migrated.refused[0].text
    assert_all_told({"distributed_type": "FSDP", **keys}, migrated)


@pytest.mark.parametrize("keys", [{"num_processes": 8}, {"gpu_ids": "0"}, {}])
def test_one_process_is_one_process(keys: dict[str, Any]) -> None:
    """TRL's own single_gpu.yaml has eight, of which `accelerate launch` starts one."""
    migrated = api.read({"distributed_type": "NO", **keys}, "accelerate")
    assert not migrated.refused
    assert migrated.settings["nproc_per_node"] == 1


@pytest.mark.parametrize(
    ("keys", "num_ranks"),
    [
        ({"gpu_ids": 0}, 1),
        ({"gpu_ids": "0, 1"}, 2),
        ({"gpu_ids": "all"}, None),
        ({"gpu_ids": "0,1", "num_processes": 1}, 1),
    ],
)
def test_devices_in_order_are_those_that_ranks_take(keys: dict[str, Any], num_ranks: int | None) -> None:
    migrated = read(**keys)
    assert not migrated.refused
    assert migrated.settings.get("nproc_per_node") == num_ranks


def test_blocks_of_other_kinds_are_not_read() -> None:
    migrated = api.read(
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, "accelerate"
    )
    assert migrated.strategy == "ddp"
    assert not migrated.refused
    assert fate(migrated, "fsdp_config.fsdp_sharding_strategy")[0] == "ignored"


@pytest.mark.parametrize("named", ["bf16", "no"])
def test_a_file_of_deepspeed_and_mixed_precision_may_not_differ(tmp_path: Path, named: str) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    (tmp_path / "a.yaml").write_text(
        f"distributed_type: DEEPSPEED\nmixed_precision: {named}\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero_stage: 3\n"
    )
    refused = {entry.key for entry in api.read(tmp_path / "a.yaml").refused}
    assert refused == {"deepspeed_config.zero_stage"} | ({"mixed_precision"} if named == "no" else set())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no", "fp8", None])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, precision: str | None) -> None:
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: nowhere/ds.json\n"
        + (f"mixed_precision: {precision}\n" if precision else "")
    )
    migrated = api.read(tmp_path / "a.yaml")
    told, text = fate(migrated, "deepspeed_config.deepspeed_config_file")
    assert told == "refused"
    assert str(Path.cwd()) in text
    assert str(tmp_path / "nowhere/ds.json") in text
    assert {entry.key for entry in migrated.refused} - {"mixed_precision"} == {"deepspeed_config.deepspeed_config_file"}


def test_a_file_is_looked_for_where_accelerate_does_and_then_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder, stage in ((beside, 1), (working, 3)):
        (folder / "configs").mkdir(parents=True)
        (folder / "configs" / "ds.json").write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
    (beside / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: configs/ds.json\n"
    )
    monkeypatch.chdir(working)
    key = "deepspeed_config.deepspeed_config_file"
    migrated = api.read(beside / "a.yaml")
    assert migrated.strategy == "zero3"
    assert fate(migrated, key) == ("used", f"read from {working / 'configs/ds.json'}: its keys follow")
    (working / "configs" / "ds.json").unlink()
    migrated = api.read(beside / "a.yaml")
    assert migrated.strategy == "zero1"
    assert fate(migrated, key) == ("used", f"read from {beside / 'configs/ds.json'}: its keys follow")


def test_of_a_file_that_is_not_there_nothing_else_is_refused() -> None:
    """As in Hugging Face's own examples, whose DeepSpeed file has to be put in first."""
    inner = {"deepspeed_config_file": "PATH_TO_DS_FILE.json", "zero3_init_flag": True}
    tree = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": inner, "num_machines": 1}
    migrated = api.read(tree, "accelerate")
    assert [entry.key for entry in migrated.refused] == ["deepspeed_config.deepspeed_config_file"]


@pytest.mark.parametrize(
    ("keys", "groups", "strategy", "node_size"),
    [
        ({}, {"dp_shard_size": 4, "dp_replicate_size": 2}, "hsdp", 4),
        ({"fsdp_reshard_after_forward": False}, {"dp_shard_size": 2, "dp_replicate_size": 4}, "hybrid_shard_zero2", 2),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"dp_shard_size": 2, "dp_replicate_size": 4}, "hsdp", 2),
        ({}, {"dp_shard_size": 8}, "zero3", None),
        ({"fsdp_reshard_after_forward": False}, {"dp_shard_size": 8, "dp_replicate_size": 1}, "shard_grad_op", None),
    ],
)  # fmt: skip
def test_groups(keys: dict[str, Any], groups: dict[str, int], strategy: str, node_size: int | None) -> None:
    for prefix in ("", "parallelism_config_"):
        named = {prefix + key: size for key, size in groups.items()}
        migrated = read(num_processes=8, fsdp_config=keys, parallelism_config=named)
        assert not migrated.refused
        assert migrated.strategy == strategy
        assert migrated.words.get("node_size") == node_size


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"dp_shard_size": 4, "dp_replicate_size": 2}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"dp_shard_size": 4, "dp_replicate_size": 2}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"dp_shard_size": 8}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"dp_shard_size": 8}),
        ({}, {"dp_shard_size": 4, "dp_replicate_size": 4}),
        ({}, {"dp_replicate_size": 8}),
        ({}, {"dp_shard_size": 0, "dp_replicate_size": 8}),
    ],
)  # fmt: skip
def test_groups_that_contradict(keys: dict[str, Any], groups: dict[str, int]) -> None:
    assert read(num_processes=8, fsdp_config=keys, parallelism_config=groups).refused
