"""DeepSpeed's JSON: what files come to, key by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.documents import json_tree
from shardwise.base.errors import ConfigurationError
from shardwise.migrate.api import from_deepspeed, kind_of, read
from shardwise.migrate.migrated import Migrated
from tests.migrate.deepspeed_expected import EXPECTED
from tests.migrate.support import require_all_told, require_sound, rows

FOLDER = Path(__file__).parent / "fixtures" / "deepspeed"
HOST = {"device": "cpu"}


def of(**written: Any) -> Migrated:
    found = read(written, "deepspeed")
    require_all_told(found, written)
    require_sound(found)
    return found


def zero(stage: Any, **written: Any) -> Migrated:
    return of(zero_optimization={"stage": stage, **written})


def refusal(found: Migrated, key: str) -> str:
    assert {entry.key for entry in found.refused} == {key}
    return rows(found)[key].text


# ---------------------------------------------------------------------------------------------------------
# whole files


def test_every_file_is_expected() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file(name: str) -> None:
    file = FOLDER / f"{name}.json"
    settings, refused = EXPECTED[name]
    found = read(file, "deepspeed")
    assert dict(found.settings) == settings
    assert {entry.key for entry in found.refused} == refused
    written = json_tree(file.read_text(), name)
    require_all_told(found, written)
    require_sound(found)
    assert kind_of(written, name) == "deepspeed"


def test_what_is_refused_is_one_error_with_all_of_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_deepspeed(FOLDER / "examples_lamb_sparse_attention.json")
    told = str(caught.value)
    assert "optimizer.type Lamb: the trainer has adamw, sgd" in told
    assert "sparse_attention" in told


def test_keywords_of_shard(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    file = tmp_path / "ds.json"
    written = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": disk}}
    file.write_text(json.dumps(written))
    assert from_deepspeed(file).words == {
        "strategy": "zero3+optimizer=disk+grads=host",
        "precision": "bf16",
        "reduce_dtype": "bf16",
        "skip_nonfinite": True,
        "disk_path": str(tmp_path),
    }


# ---------------------------------------------------------------------------------------------------------
# the stage, and what goes with it


@pytest.mark.parametrize(("stage", "strategy"), list(enumerate(["ddp", "zero1", "zero2", "zero3"])))
def test_a_stage_is_that_stage(stage: int, strategy: str) -> None:
    for written in (stage, str(stage), float(stage)):
        assert zero(written).strategy == strategy


@pytest.mark.parametrize("stage", [4, -1, 2.5, "two", "auto", [2], {"of": 2}, True])
def test_what_is_no_stage_is_refused(stage: Any) -> None:
    assert zero(stage).refused


def test_a_slip_of_the_pen_does_not_turn_sharding_off() -> None:
    found = of(zero_optimisation={"stage": 3})
    assert refusal(found, "zero_optimisation") == "unknown key; did you mean 'zero_optimization'?"


def test_a_key_in_the_wrong_block_is_told_the_right_one() -> None:
    found = of(stage3_max_live_parameters=10)
    assert "did you mean 'zero_optimization.stage3_max_live_parameters'?" in refusal(
        found, "stage3_max_live_parameters"
    )
    found = zero(2, gradient_clipping=1.0)
    assert "did you mean 'gradient_clipping'?" in refusal(found, "zero_optimization.gradient_clipping")


def test_a_dot_does_not_make_a_block() -> None:
    assert refusal(of(**{"zero_optimization.stage": 3}), "'zero_optimization.stage'")


def test_the_old_form_is_stage_one() -> None:
    assert of(zero_optimization=True, allgather_size=100).strategy == "zero1"
    assert of(zero_optimization=False).strategy == "ddp"


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ({"stage": 1, "offload_optimizer": HOST}, "zero1+optimizer=host+grads=host"),
        ({"stage": 2, "offload_optimizer": HOST}, "zero2+optimizer=host+grads=host"),
        ({"stage": 2, "cpu_offload": True}, "zero2+optimizer=host+grads=host"),
        ({"stage": 3, "offload_optimizer": {**HOST, "ratio": "0.25"}}, "zero3+optimizer=host:0.25+grads=host"),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, "zero3+optimizer=host+grads=host+params=host"),
        ({"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "NONE"}}, "zero3"),
        ({"stage": 2, "offload_param": HOST}, "zero2"),
        ({"stage": 1, "offload_param": {"device": "nvme", "nvme_path": "/a"}}, "zero1"),
        ({"stage": 3, "zero_hpz_partition_size": 4}, "hpz"),
        ({"stage": 3, "zero_hpz_partition_size": 1}, "zero3"),
        ({"stage": 3, "mics_shard_size": 2, "offload_optimizer": HOST}, "hsdp+optimizer=host+grads=host"),
        ({"stage": 3, "zero_quantized_weights": True}, "zero3+params_as=int8"),
        (
            {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
            "zero3+grads_as=int4:feedback",
        ),
        ({"stage": 2, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}, "zero2"),
    ],
)
def test_strategies(written: dict[str, Any], strategy: str) -> None:
    found = of(zero_optimization=written)
    assert found.strategy == strategy
    assert not found.refused


@pytest.mark.parametrize(
    ("key", "written", "sentence"),
    [
        ("offload_optimizer.device", {"stage": 0, "offload_optimizer": HOST}, "in stages 1 to 3 only"),
        ("offload_optimizer.device", {"stage": 3, "offload_optimizer": {"device": "nvme"}}, "needs nvme_path"),
        ("offload_optimizer.device", {"stage": 3, "offload_optimizer": {"device": "gpu"}}, "known: cpu, none, nvme"),
        ("offload_optimizer.device", {"stage": 3, "offload_optimizer": {"device": "auto"}}, "auto is not possible"),
        ("offload_optimizer.ratio", {"stage": 3, "offload_optimizer": {**HOST, "ratio": 0}}, "offloads nothing"),
        ("offload_optimizer.ratio", {"stage": 3, "offload_optimizer": {**HOST, "ratio": 1.5}}, "it must be at most 1"),
        ("cpu_offload", {"stage": 2, "cpu_offload": True, "offload_optimizer": HOST}, "old form"),
        ("mics_shard_size", {"stage": 2, "mics_shard_size": 2}, "groups need stage 3"),
        (
            "zero_hpz_partition_size",
            {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2},
            "a group has its copy already",
        ),
        (
            "zero_quantized_nontrainable_weights",
            {"stage": 3, "zero_quantized_nontrainable_weights": True},
            "leave it out",
        ),
        ("zenflow", {"stage": 2, "zenflow": {}}, "with old gradients"),
        ("zenflow", {"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "with old gradients"),
        ("legacy_stage1", {"stage": 1, "legacy_stage1": True}, "DeepSpeed has removed it"),
        ("max_live_parameters", {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}, "leave one"),
        ("prefetch_bucket_size", {"stage": 3, "prefetch_bucket_size": "much"}, "is not a whole number"),
        ("offload_optimizer", {"stage": 3, "offload_optimizer": "cpu"}, "is not a mapping"),
    ],
)
def test_what_cannot_be(key: str, written: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(of(zero_optimization=written), f"zero_optimization.{key}")


def test_an_encoded_copy_in_a_node_stays_on_the_device() -> None:
    """The table's own sentence."""
    both = {"offload_optimizer": HOST, "offload_param": HOST}
    found = zero(3, zero_hpz_partition_size=2, zero_quantized_weights=True, **both)
    assert "stays on the device if it is encoded" in refusal(found, "zero_optimization.zero_quantized_weights")


def test_two_folders() -> None:
    one, other = ({"device": "nvme", "nvme_path": path} for path in ("/a", "/b"))
    found = zero(3, offload_optimizer=one, offload_param=other)
    assert "everything on disk is in one folder" in refusal(found, "zero_optimization.offload_param.nvme_path")


def test_a_disk_below_stage_three_is_not_quietly_the_host() -> None:
    disk = {"device": "nvme", "nvme_path": "/a"}
    assert "on the host all the same" in refusal(
        zero(2, offload_optimizer=disk), "zero_optimization.offload_optimizer.device"
    )


def test_buffers_of_the_original() -> None:
    assert of().original.bucket_elems == 0
    assert zero(2, reduce_bucket_size=100).original.bucket_elems == 100
    assert zero(1, reduce_bucket_size=100, overlap_comm=True).original.bucket_elems == 200
    assert zero(3, reduce_bucket_size="1e2", stage3_prefetch_bucket_size=7).original.bucket_elems == 107
    found = zero(3, reduce_bucket_size="auto")
    assert found.original.bucket_elems == 50_000_000
    assert "hidden size" in rows(found)["zero_optimization.reduce_bucket_size"].text


# ---------------------------------------------------------------------------------------------------------
# precision

ON = {"enabled": True}


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ({}, {"precision": "fp32"}),
        ({"bfloat16": ON}, {"precision": "bf16", "reduce_dtype": "bf16", "skip_nonfinite": True}),
        ({"fp16": ON}, {"precision": "fp16"}),
        ({"fp16": {"enabled": "auto"}}, {}),
        ({"fp16": ON, "bf16": {"enabled": "auto"}}, {"precision": "fp16"}),
        (
            {"bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"precision": "pure-bf16", "reduce_dtype": "bf16", "skip_nonfinite": True},
        ),
        (
            {"bf16": ON, "data_types": {"grad_accum_dtype": "float32", "param_dtype": "bf16"}},
            {"precision": "bf16", "reduce_dtype": "fp32", "skip_nonfinite": True},
        ),
        (
            {"bf16": ON, "communication_data_type": "fp32"},
            {"precision": "bf16", "reduce_dtype": "fp32", "skip_nonfinite": True},
        ),
    ],
)
def test_precisions(written: dict[str, Any], settings: dict[str, Any]) -> None:
    found = of(**written)
    assert not found.refused
    assert {"strategy": "ddp", **settings, "max_grad_norm": 1.0} == found.settings


@pytest.mark.parametrize(
    ("written", "wire"),
    [
        ({"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}, "bf16"),
        ({"bf16": ON, "communication_data_type": "FP16"}, "fp16"),
        ({"fp16": ON, "communication_data_type": "fp16"}, "fp16"),
        ({"communication_data_type": "bf16"}, "bf16"),
    ],
)
def test_gradients_that_travel_in_fewer_bits_than_they_are_summed_in(written: dict[str, Any], wire: str) -> None:
    found = of(zero_optimization={"stage": 2}, **written)
    assert found.strategy == f"zero2+grads_as={wire}"
    assert found.settings.get("reduce_dtype", "fp32") == "fp32"


@pytest.mark.parametrize(
    ("stage", "written", "skips"),
    [
        (0, {}, False),
        (1, {}, True),
        (3, {}, True),
        (0, {"bf16": ON}, True),
        (2, {"bf16": {**ON, "check_grad_overflow": False}}, False),
        (3, {"bf16": {**ON, "check_grad_overflow": False}}, True),
        (1, {"bf16": {**ON, "check_grad_overflow": False}}, False),
        (1, {"bf16": {**ON, "check_grad_overflow": False}, "data_types": {"grad_accum_dtype": "fp32"}}, True),
        (1, {"bf16": {"enabled": "auto"}}, True),
        (0, {"bf16": {"enabled": "auto"}}, False),
    ],
)
def test_steps_that_deepspeed_leaves_out(stage: int, written: dict[str, Any], skips: bool) -> None:
    assert of(zero_optimization={"stage": stage}, **written).settings.get("skip_nonfinite", False) == skips


@pytest.mark.parametrize(
    ("key", "written", "sentence"),
    [
        ("fp16.enabled", {"fp16": ON, "bf16": ON}, "a model computes in one of them"),
        (
            "fp16.fp16_master_weights_and_grads",
            {"fp16": {**ON, "fp16_master_weights_and_grads": 1}},
            "masters are fp32",
        ),
        ("bf16.bf16_master_weights_and_grads", {"bf16": {**ON, "bf16_master_weights_and_grads": True}}, "or neither"),
        (
            "bf16.bf16_optimizer_states",
            {"bf16": {"enabled": "auto", "bf16_optimizer_states": True}},
            "with enabled: true",
        ),
        ("bfloat16.enabled", {"bf16": ON, "bfloat16": ON}, "leave one"),
        ("torch_autocast.enabled", {"torch_autocast": {**ON, "dtype": "bfloat16"}}, "under torch.autocast"),
        (
            "data_types.param_dtype",
            {"bf16": ON, "data_types": {"param_dtype": "fp16"}},
            "it contradicts precision bf16",
        ),
        ("data_types.buffer_dtype", {"data_types": {"buffer_dtype": "bf16"}}, "cast them before sw.shard"),
        ("communication_data_type", {"communication_data_type": "int8"}, "unknown"),
    ],
)
def test_precisions_that_cannot_be(key: str, written: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(of(**written), key)


# ---------------------------------------------------------------------------------------------------------
# batch, optimizer, schedule


@pytest.mark.parametrize(
    ("batch", "micro", "num_micro", "settings"),
    [
        (None, 4, None, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}),
        (16, None, None, {"global_batch_size": 16}),
        ("auto", 4, "auto", {"per_device_train_batch_size": 4}),
        (16, 4, None, {"global_batch_size": 16, "per_device_train_batch_size": 4}),
        (
            "16",
            "2",
            "4",
            {"global_batch_size": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
    ],
)
def test_batches(batch: Any, micro: Any, num_micro: Any, settings: dict[str, Any]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    written = {key: value for key, value in zip(keys, (batch, micro, num_micro), strict=True) if value is not None}
    found = of(**written)
    assert found.settings == {"strategy": "ddp", "precision": "fp32", "max_grad_norm": 1.0, **settings}


def test_an_equation_without_a_solution() -> None:
    found = of(train_batch_size=10, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    assert "make it a multiple of 8" in refusal(found, "train_batch_size")


def optimizer(kind: str, **params: Any) -> Migrated:
    return of(optimizer={"type": kind, "params": params})


def test_adam_is_adamw_and_decays_what_its_class_decays() -> None:
    assert optimizer("Adam").settings["optimizer"] == "adamw"
    assert optimizer("adamw").settings["weight_decay"] == 0
    assert optimizer("AdamW", torch_adam=True).settings["weight_decay"] == 0.01
    assert "norms and biases" in rows(optimizer("AdamW", weight_decay=0.1))["optimizer.params.weight_decay"].text


def test_adam_that_is_not_adamw() -> None:
    assert not optimizer("Adam", adam_w_mode=False).refused
    found = optimizer("Adam", adam_w_mode=False, weight_decay=0.1)
    assert "decay inside the gradient" in refusal(found, "optimizer.params.adam_w_mode")
    assert not optimizer("AdamW", adam_w_mode=False, weight_decay=0.1).refused  # DeepSpeed does not ask it there


def test_sgd() -> None:
    found = optimizer("SGD", lr=0.1, momentum=0.5)
    assert found.settings["optimizer"] == "sgd"
    assert found.settings["momentum"] == 0.5
    assert optimizer("SGD").settings["momentum"] == 0
    assert refusal(optimizer("SGD", nesterov=True, momentum=0.5), "optimizer.params.nesterov")


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Muon", "Adagrad", "OneBitAdam"])
def test_optimizers_that_the_trainer_does_not_have(kind: str) -> None:
    assert "give sw.shard your own optimizer" in refusal(optimizer(kind, lr=1, freeze_step=2), "optimizer.type")


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], "0.9", [0.9, "x"], {"first": 0.9}])
def test_betas_that_are_none(betas: Any) -> None:
    assert refusal(optimizer("AdamW", betas=betas), "optimizer.params.betas")


def test_parameters_of_nobody() -> None:
    assert refusal(of(optimizer={"params": {"lr": 1}}), "optimizer.params.lr")
    assert refusal(of(scheduler={"params": {"warmup_num_steps": 1}}), "scheduler.params.warmup_num_steps")


def test_clipping_is_on_unless_it_is_turned_off() -> None:
    assert of().settings["max_grad_norm"] == 1.0
    assert of(gradient_clipping=0).settings["max_grad_norm"] == 0
    assert "optimizer.clip_grad_norm(0.5)" in rows(of(gradient_clipping=0.5))["gradient_clipping"].text
    off = rows(of(gradient_clipping=0.0))["gradient_clipping"].text
    assert "clipping is off" in off
    assert "clip_grad_norm(" not in off
    assert "max_grad_norm" not in of(gradient_clipping="auto").settings


def test_a_schedule_without_total_steps_is_as_long_as_the_run() -> None:
    found = of(scheduler={"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}})
    assert found.settings["learning_rate"] == 1e-3
    assert found.settings["warmup_steps"] == 1000
    assert "schedule_steps" not in found.settings


def test_a_schedule_has_a_learning_rate_of_its_own() -> None:
    """DeepSpeed's default of it, too, counts more than the optimizer's."""
    adam = {"type": "AdamW", "params": {"lr": 0.5}}
    found = of(optimizer=adam, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}})
    assert found.settings["learning_rate"] == 1e-3
    assert rows(found)["optimizer.params.lr"].fate == "ignored"
    found = of(optimizer=adam, scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0.25}})
    assert found.settings["learning_rate"] == 0.5
    assert found.settings["warmup_min_ratio"] == 0.5


def test_a_warm_up_from_nowhere() -> None:
    found = of(scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": "auto"}})
    assert "must be at most warmup_max_lr" in refusal(found, "scheduler.params.warmup_min_lr")


# ---------------------------------------------------------------------------------------------------------
# the rest


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("compile.deepcompile", {"compile": {"deepcompile": True, "passes": ["z3"]}}),
        ("pipeline", {"pipeline": {"stages": 4}}),
        ("hybrid_engine.enabled", {"hybrid_engine": {"enabled": True, "max_out_tokens": 4}}),
        ("weight_quantization", {"weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}}}),
        ("datastates_ckpt", {"datastates_ckpt": {"host_cache_size": 16}}),
        ("elasticity.enabled", {"elasticity": {"enabled": True, "max_train_batch_size": 4}}),
        ("sparse_gradients", {"sparse_gradients": True}),
        ("fp8.enabled", {"fp8": {"enabled": True}}),
        ("aio.block_size", {"aio": {"block_size": "large"}}),
        ("timers.throughput.enabled", {"timers": {"throughput": {"enabled": "maybe"}}}),
    ],
)
def test_what_cannot_be_followed(key: str, written: dict[str, Any]) -> None:
    assert refusal(of(**written), key)


def test_what_is_off_is_off() -> None:
    found = of(
        amp={"enabled": False, "opt_level": "O1"},
        elasticity={"enabled": False},
        sparse_gradients=False,
        hybrid_engine={"enabled": False},
        tensor_parallel={"autotp_size": 1},
        compile={"deepcompile": False, "passes": ["z3"]},
        sequence_parallel_size=1,
        datastates_ckpt=False,
    )
    assert not found.refused


def test_forms_that_people_write_and_that_change_nothing() -> None:
    """Keys that DeepSpeed's blocks drop (auto), that it has no use for, or that only change which steps are skipped."""
    found = of(
        fp16={**ON, "loss_scale": 1024, "auto_cast": True},
        bf16={"enabled": False, "auto_cast": False, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
        zero_optimization={
            "stage": 3, "sub_group_size": "auto", "overlap_comm": "auto", "stage3_max_live_parameters": "auto",
            "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
        },
        comet={"enabled": True, "project": "x"}, logging={"level": "info"}, enable_cuda_graph=False,
    )  # fmt: skip
    assert not found.refused
    assert found.strategy == "zero3"
    assert found.precision == "fp16"
    assert "offload" not in found.settings
    assert "no 16-bit shard" in rows(found)["zero_optimization.offload_param.device"].text


@pytest.mark.parametrize(
    ("name", "ours"), [("FusedAdam", "adamw"), ("DeepSpeedCPUAdam", "adamw"), ("cpuadam", "adamw")]
)
def test_classes_of_deepspeed_are_the_optimizer_that_they_compute(name: str, ours: str) -> None:
    found = of(optimizer={"type": name, "params": {"lr": 1e-4, "weight_decay": 0.1, "bias_correction": True}})
    assert not found.refused
    assert (found.settings["optimizer"], found.settings["weight_decay"]) == (ours, 0.1)
    assert refusal(of(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-4}}), "optimizer.type")


def test_a_warm_up_of_nothing_is_deepspeeds_shortest() -> None:
    found = of(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_max_lr": 1e-3}})
    assert not found.refused
    assert found.settings["warmup_steps"] == 2


@pytest.mark.parametrize("key", ["max_grad_norm", "lr_scheduler"])
def test_a_key_that_deepspeed_overlooks_is_refused_with_its_own(key: str) -> None:
    written = {"max_grad_norm": 0.5, "lr_scheduler": {"type": "WarmupLR"}}[key]
    assert "DeepSpeed has no such key" in refusal(of(**{key: written}), key)


def test_what_belongs_to_a_precision_that_is_off() -> None:
    off = {"enabled": False}
    found = of(
        fp16={**off, "loss_scale": 128, "fp16_master_weights_and_grads": True},
        bf16={**off, "bf16_master_weights_and_grads": True},
    )
    assert not found.refused
    assert found.precision == "fp32"


def test_blocks_of_null_do_not_hide_whose_file_it_is() -> None:
    file = {"zero_optimization": {"stage": 2}, "train_batch_size": 8, "fp16": None, "bf16": None, "optimizer": None}
    assert kind_of(file, "ds.json") == "deepspeed"


def test_null_says_nothing() -> None:
    found = of(zero_optimization=None, fp16={"enabled": None}, gradient_clipping=None, optimizer={"params": None})
    assert {entry.fate for entry in found.entries} == {"ignored"}


def test_a_key_that_is_said_twice(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ConfigurationError, match="stage is said twice"):
        from_deepspeed(file)


def test_what_asks_for_nothing_is_ignored() -> None:
    found = of(
        fp16={"enabled": False, "auto_cast": True}, nobody_knows_it=None, _description="for eight GPUs", _comment=["a"],
        **{"//": "the batch follows", "$schema": "ds.json"}, zero_optimization={"stage": 2, "_note": {"by": "me"}},
    )  # fmt: skip
    assert not found.refused
    assert rows(found)["fp16.auto_cast"].text == "fp16 is off"
    assert rows(found)["_description"].text == "a comment"
    assert rows(found)["nobody_knows_it"].text == "it is empty"
    assert "always cast here" in rows(of(fp16={"enabled": True, "auto_cast": True}))["fp16.auto_cast"].text
