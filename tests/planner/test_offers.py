"""Clusters compared and searched: days, GPU-hours and dollars, how clusters are read, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError, nearest_names
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.gpus import GPUS
from shardwise.planner.offers import compare, smallest
from shardwise.planner.planning import Plan, plan
from shardwise.planner.shapes.names import NAMED
from tests.cli.asking import Asker
from tests.planner.conftest import Answer

SMALL: dict[str, Any] = {"seq": 1024}


@pytest.mark.parametrize(
    ("text", "nodes", "shape"),
    [
        ("8xH100", None, (8, 1)),
        ("16xA100-80GB", None, (8, 2)),
        ("16xA100-80GB", 1, (16, 1)),
        ("16xA100-80GB", 2, (16, 2)),
        ("2048xH100", None, (8, 256)),
        ("4x8xH100", None, (8, 4)),
        ("4 x 4 x RTX-4090", None, (4, 4)),
        ("72xGB200", None, (72, 1)),
        ("144xGB200", None, (72, 2)),
        ("p5.48xlarge", None, (8, 1)),
        ("4xp5.48xlarge", None, (8, 4)),
        ("p5.48xlarge", 3, (8, 3)),
        ("Standard_ND96isr_H100_v5", None, (8, 1)),
    ],
)
def test_clusters_from_words(text: str, nodes: int | None, shape: tuple[int, int]) -> None:
    made = make_cluster(text, nodes)
    assert (made.node_size, made.num_nodes) == shape
    if nodes is None:  # a cluster's own name makes it again, except for one node that is larger than usual
        assert make_cluster(str(made)).world_size == made.world_size


@pytest.mark.parametrize(
    ("text", "nodes"), [("12xH100", None), ("2x8xH100", 2), ("2xp5.48xlarge", 2), ("2xp5.49xlarge", None)]
)
def test_clusters_that_are_none(text: str, nodes: int | None) -> None:
    with pytest.raises(ConfigurationError, match="GPUs: "):
        make_cluster(text, nodes)


def test_an_instance_has_its_own_network_and_host() -> None:
    made = make_cluster("2xp4d.24xlarge")
    assert (made.network, made.host_bytes, made.gpu.name) == ("efa-p4d", 1237 * 10**9, "A100-40GB")
    assert make_cluster("2xp4d.24xlarge", network="ib-hdr", host_memory="2TB").network == "ib-hdr"


@pytest.mark.parametrize(
    ("name", "known", "first"),
    [
        ("llama4", NAMED, "llama"),
        ("mistral-large", NAMED, "mistral"),
        ("H1000", GPUS, "H100-80GB"),
        ("mi300", GPUS, "MI300X"),
        ("3090ti", GPUS, "RTX-3090"),
        ("B100", GPUS, "B200"),
        ("8b", NAMED, "llama-3-8b"),
    ],
)
def test_an_unknown_name_lists_the_nearest_three(name: str, known: dict[str, Any], first: str) -> None:
    hint = nearest_names(name, known)
    assert hint.startswith("did you mean '")
    assert f"'{first}" in hint
    assert hint.count("'") <= 10


def test_a_name_like_none_lists_all() -> None:
    assert all(name in nearest_names("tpu-v5", GPUS) for name in GPUS)


def test_model_and_gpus_are_refused_together(ask: Asker) -> None:
    said = ask("plan", "llama-9")
    assert said.code == 2
    assert "llama-3-8b" in said.err
    assert "give --gpus" in said.err


def test_compare_plans_each_cluster_as_the_plan_does() -> None:
    answer = compare("llama-3-8b", ["8xH100", "16xA100-80GB"], num_tokens=1e9, prices=2.0, **SMALL)
    for row, gpus in zip(answer["clusters"], ("8xH100", "16xA100-80GB"), strict=True):
        made = plan("llama-3-8b", gpus, search=False, **SMALL)
        assert isinstance(made, Plan)
        assert made.recommended is not None
        assert row["name"] == made.recommended.name
        num = row["cluster"]["world_size"]
        seconds = 1e9 / (made.recommended.tokens_per_s * num)
        assert row["days"] == pytest.approx(seconds / 86400)
        assert row["gpu_hours"] == pytest.approx(seconds / 3600 * num)
        assert row["dollars"] == pytest.approx(2 * row["gpu_hours"])
        assert row["tokens_per_step"] == num * 1024


def test_the_cheapest_is_taken_and_near_ties_go_to_the_fastest() -> None:
    clusters, prices = ["8xH100", "64xH100", "64xA100-80GB"], {"H100-80GB": 2.0, "A100-80GB": 9.0}
    answer = compare("llama-3-8b", clusters, num_tokens=1e9, prices=prices, **SMALL)
    assert answer["recommended"] == 1
    answer = compare("llama-3-8b", clusters, num_tokens=1e9, prices={**prices, "A100-80GB": 0.1}, **SMALL)
    assert answer["recommended"] == 2


def test_what_does_not_fit_has_a_reason_and_precision_follows_the_gpu() -> None:
    answer = compare("gpt-1t", ["T4", "8xV100-32GB"], **SMALL)
    assert answer["recommended"] is None
    assert all(row["why_not"] and not row["fits"] for row in answer["clusters"])
    answer = compare("gpt2", ["T4", "RTX-4090"], **SMALL)
    assert [row["precision"] for row in answer["clusters"]] == ["fp16", "bf16"]
    assert answer["training"]["precision"] == "bf16"  # of the cluster that is taken


def test_smallest_is_the_first_size_that_is_fast_enough() -> None:
    answer = smallest("llama-3-8b", "8xH100", days=14, num_tokens=100e9, **SMALL)
    before, best = answer["clusters"]
    assert before["days"] > 14 >= best["days"]
    assert answer["recommended"] == 1
    assert best["cluster"]["num_nodes"] == before["cluster"]["num_nodes"] + 1


def test_smallest_that_fits_with_and_without_offload() -> None:
    some, all_on_gpus = smallest("llama-3-70b", "8xH100", **SMALL)["clusters"]
    assert some["host_bytes"] or some["disk_bytes"]
    assert not all_on_gpus["host_bytes"]
    assert all_on_gpus["cluster"]["world_size"] == 24
    # One node fewer does not fit.
    made = plan("llama-3-70b", "16xH100", search=False, **SMALL)
    assert isinstance(made, Plan)
    assert not any(entry.fits and entry.is_on_device for entry in made.found)


def test_sizes_that_do_not_divide_the_global_batch_are_skipped_and_named() -> None:
    answer = smallest("llama-3-8b", "8xH100", days=5, num_tokens=100e9, global_batch=64, **SMALL)
    assert [row["cluster"]["world_size"] for row in answer["clusters"]] == [32, 64]
    assert any("skipped" in note and "24, 40" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("asked", "why"), [({"global_batch": 64, "days": 1}, "8 x 8 x H100"), ({"days": 0.001}, "1024 x 8 x H100")]
)
def test_not_even_the_largest_is_enough(asked: dict[str, Any], why: str) -> None:
    answer = smallest("llama-3-8b", "8xH100", num_tokens=100e9, **asked, **SMALL)
    assert answer["recommended"] is None
    assert why in answer["why"]


def test_notes_say_what_is_not_modelled(plan: Answer) -> None:
    assert any("expert" in note for note in plan("mixtral-8x7b", "--gpus", "8xH200")["notes"])
    assert any("tensor" in note for note in plan("llama-3-8b", "--gpus", "1024xH100")["notes"])
    assert any("usual 8" in note for note in plan("llama-3-8b", "--gpus", "16xH100", "--nodes", "2")["notes"])
    assert plan("llama-3-8b", "--gpus", "16xH100")["notes"] == []


def test_a_plan_has_its_costs(plan: Answer) -> None:
    answer = plan("llama-3-8b", "--gpus", "16xH100", "--tokens", "100B", "--price", "H100=2.5")
    row = answer["strategies"][0]
    assert row["gpu_hours"] == pytest.approx(row["days"] * 24 * 16)
    assert row["dollars"] == pytest.approx(row["gpu_hours"] * 2.5)


TOKENS = ("--tokens", "1B")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--compare", "8xH100", "--gpus", "8xH100"), "--compare"),
        (("--compare", "8xH100,"), "names no GPU"),
        (("--compare", "8xH100,8xH1000"), "H100-80GB"),
        (("--compare", "8xH100", "--html", "x.html"), "--html"),
        (("--compare", "8xH100", "--explain"), "--explain"),
        (("--compare", "8xH100", "--nodes", "2"), "--nodes"),
        (("--compare", "8xH100", "--fit"), "--fit"),
        (("--fit", "--gpus", "8xH100", "--nodes", "2"), "--nodes"),
        (("--fit",), "give --gpus"),
        (("--days", "14", "--gpus", "8xH100"), "--tokens"),
        (("--days", "-1", "--gpus", "8xH100", *TOKENS), "above 0"),
        (("--gpus", "8xH100,8xH200"), "--compare"),
        (("--gpus", "8xH100", "--price", "2.5"), "--tokens"),
        (("--gpus", "8xH100", "--price", "free", *TOKENS), "--price"),
        (("--gpus", "8xH100", "--price", "-1", *TOKENS), "--price"),
        (("--gpus", "8xH100", "--price", "A100-80GB=2", *TOKENS), "no price for H100-80GB"),
        (("--gpus", "8xH100", "--price", "2,3", *TOKENS), "--price"),
        (("--gpus", "8xH100", "--price", "H100=2,H100-80GB=3", *TOKENS), "--price"),
        (("--fit", "--gpus", "8xH100", "--optimizer", "adamm"), "did you mean 'adamw'"),
        (("--compare", "8xV100-32GB,8xT4", "--precision", "bf16"), "bf16"),
    ],
)
def test_what_is_refused_in_one_sentence(ask: Asker, words: tuple[str, ...], why: str) -> None:
    said = ask("plan", "llama-3-8b", *words)
    assert said.code == 2
    assert why in said.err
    assert said.err.count("\n") == 1


def test_states_alone_have_no_time(ask: Asker) -> None:
    said = ask("plan", "--shape", "params=7e9", "--compare", "8xH100,8xA100-80GB")
    assert said.code == 2


def test_tables_name_what_is_taken(ask: Asker) -> None:
    said = ask("plan", "llama-3-8b", "--compare", "64xH100,RTX-4090,12xH200", *TOKENS, "--price", "2")
    assert said.code == 2  # 12 GPUs are no whole nodes
    said = ask("plan", "llama-3-8b", "--compare", "64xH100,8xV100-16GB", *TOKENS, "--price", "2")
    assert said.out.startswith("Take 8 x 8 x H100-80GB: ")
    assert "dollars" in said.out
    assert max(map(len, said.out.splitlines())) <= 120
    said = ask("plan", "llama-3-8b", "--fit", "--gpus", "8xT4", "--host-memory", "8GB", "--disk", "8GB")
    assert "> " in said.out
    assert ask("plan", "gpt-1t", "--compare", "T4", "--require-fit").code == 3


def test_no_torch_is_imported() -> None:
    code = """
import sys
from shardwise.planner.offers import compare
compare("gpt2", ["8xH100", "T4"])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_clusters_that_are_as_fast_the_smaller_one() -> None:
    answer = compare("llama-3-8b", ["16xA100-80GB", "8xH100"])
    speeds = [row["tokens_per_second"] for row in answer["clusters"]]
    assert answer["recommended"] == 1
    assert speeds[0] == pytest.approx(speeds[1], rel=0.01)
    assert "as fast, with more GPUs" in answer["why"]


def test_a_cluster_that_is_tight_is_said_to_be() -> None:
    answer = smallest("llama-3-8b", "8xRTX-4090")
    assert answer["clusters"][answer["recommended"]]["tight"]
    assert "tight: only" in answer["why"]


def test_another_precision_is_named() -> None:
    assert "2 x T4 trains in fp16" in compare("llama-3.2-1b", ["8xH100", "2xT4"])["notes"]


def test_what_the_model_leaves_out_is_a_note() -> None:
    assert any("vision tower" in note for note in compare("gemma-3-27b", ["8xB200"])["notes"])


def test_the_number_of_nodes_is_searched_not_given() -> None:
    with pytest.raises(ConfigurationError, match="name one node"):
        smallest("llama-3-8b", "4x8xH100")
