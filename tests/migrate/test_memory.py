"""What the other library would need is what it says itself."""

from typing import Any

import pytest

from shardwise.migrate.memory_comparison import Need, compare_memory
from shardwise.migrate.migrated import Migrated, Original

PARAMS = 10**9


def migrated(strategy: str, engine: Any = "deepspeed", precision: str = "bf16", **settings: Any) -> Migrated:
    return Migrated("it", "deepspeed", {"strategy": strategy, "precision": precision, **settings}, Original(engine), ())


def theirs(strategy: str, gpus: str = "8xH100-80GB", nodes: int = 1, **changes: Any) -> Need:
    return compare_memory(migrated(strategy, **changes), None, gpus, nodes).needs[1]


@pytest.mark.peers
@pytest.mark.parametrize(("gpus", "nodes"), [(8, 1), (4, 2), (1, 1)])
def test_deepspeed_is_counted_as_it_counts_itself(gpus: int, nodes: int) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as third
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as second

    def ours(strategy: str) -> float:
        return theirs(strategy, f"{gpus}xH100-80GB", nodes).states

    assert ours("zero2") == second(PARAMS, gpus, nodes, cpu_offload=False)[1]
    assert ours("zero2_offload") == second(PARAMS, gpus, nodes, cpu_offload=True)[1]
    without = {"cpu_offload": False, "cpu_offload_params": False}
    assert ours("zero3") == third(PARAMS, 0, gpus, nodes, **without)[1]
    assert ours("zero3_offload") == third(PARAMS, 0, gpus, nodes)[1] == 0
    some = third(PARAMS, 0, gpus, nodes, cpu_offload=True, cpu_offload_params=False)[1]
    assert ours("zero3+grads=host+optimizer=host") == some


def test_torch_keeps_what_it_trains_in_the_format_that_it_trains_in() -> None:
    for precision, size in (("bf16", 4), ("pure-bf16", 2)):
        assert theirs("ddp", engine="ddp", precision=precision).states == size * (1 + 2 + 2) * PARAMS


def test_layers_that_are_gathered_and_buckets_come_on_top() -> None:
    asked = Migrated("it", "deepspeed", {"strategy": "zero3", "precision": "bf16"}, Original("deepspeed", 5e8), ())
    found = compare_memory(asked, "llama-3-8b", "8xH100-80GB", 1)
    # DeepSpeed's largest layer in 4 bytes: here the table of 128,256 words.
    assert found.needs[1].extra == 5e8 * 2 + 4 * 128256 * 4096
    assert found.needs[0].peak is not None


def test_ours_is_what_the_readme_says() -> None:
    for strategy, expected in (("zero3", 16 / 8), ("ddp", 2 + 4 + 12), ("zero1", 6 + 12 / 8), ("zero2", 2 + 16 / 8)):
        assert compare_memory(migrated(strategy), None, "8xH100-80GB", 1).needs[0].states == pytest.approx(
            expected * PARAMS, rel=1e-4
        )


def test_groups_of_their_own_are_nodes_of_the_plan() -> None:
    found = compare_memory(migrated("hsdp", node_size=4), None, "8xH100-80GB", 2)
    assert found.cluster == "4 x 4 x H100-80GB"
    assert found.needs[0].states == pytest.approx(16 / 4 * PARAMS, rel=1e-4)


def test_as_many_ranks_as_the_file_says() -> None:
    found = compare_memory(migrated("zero3", nproc_per_node=4, nnodes="2"), None, None, None)
    assert found.cluster == "2 x 4 x H100-80GB"


def test_torch() -> None:
    assert theirs("ddp", engine="ddp").states == 20 * PARAMS
    assert theirs("zero3", engine="fsdp").states == 16 * PARAMS / 8
    found = compare_memory(migrated("zero3", engine="fsdp"), "llama-3-8b", "8xH100-80GB", 1)
    assert 0.7 * found.needs[1].peak < found.needs[0].peak < found.needs[1].peak
    kept = theirs("shard_grad_op", engine="fsdp")
    assert (kept.states, kept.extra) == (16 * PARAMS / 8, 2 * PARAMS)


def test_a_part_of_the_optimizer_stays_on_the_device() -> None:
    ours, original = compare_memory(migrated("zero2+optimizer=host:0.3+grads=host"), None, "8xH100-80GB", 1).needs
    assert ours.states == pytest.approx((2 + 0.7 * 12 / 8 + 0.7 * 4 / 8) * PARAMS, rel=0.05)
    assert original.states == (2 + 0.7 * 16 / 8) * PARAMS


def test_adapters_and_optimizers_count() -> None:
    asked = migrated("ddp", "ddp", lora={"r": 16, "alpha": 32.0, "targets": ("q_proj",)})
    ours, original = compare_memory(asked, "llama-3-8b", "8xH100-80GB", 1).needs
    assert ours.states == pytest.approx(2 * 8.03e9, rel=0.01)
    assert original.states == pytest.approx(2 * 8.03e9, rel=0.02)
    plain = migrated("ddp", "ddp", precision="fp32", optimizer="sgd", momentum=0)
    ours, original = compare_memory(plain, None, "8xH100-80GB", 1).needs
    assert ours.states == pytest.approx(8 * PARAMS, rel=1e-4)
    assert original.states == 12 * PARAMS  # gradients twice
