"""Every configuration in `examples/` resolves, and what its comments say is so."""

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli.train import ALONE, PRINTERS
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.planning import Plan, plan
from shardwise.trainer.config import FIELDS, resolve
from shardwise.trainer.settings import Settings
from shardwise.trainer.shapes import PRESETS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
# Parameters of the models on the Hub that have the shape of one of ours.
SHAPES = {"meta-llama/Llama-3.1-8B": "llama-3-8b", "meta-llama/Llama-3.1-70B": "llama-3-70b"}


def of(name: str) -> Settings:
    return resolve([str(EXAMPLES / name)], {}, {}).settings


def num_params(preset: str) -> int:
    shape, vocab = PRESETS[preset].shape, PRESETS[preset].vocab
    hidden, kv = shape["hidden"], shape["hidden"] // shape["heads"] * shape["kv_heads"]
    block = 2 * hidden * (hidden + kv) + 3 * hidden * shape["ffn"] + 2 * hidden
    return shape["layers"] * block + hidden + vocab * hidden * (1 if shape["tied"] else 2)


def test_there_is_one_for_each_common_case() -> None:
    assert [file.stem for file in FILES] == [
        "chat-sft", "finetune-70b-64gpu", "finetune-8b-1gpu", "finetune-8b-8gpu", "lora-8b", "pretrain-1b", "tiny-cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_resolves_and_says_everything_itself(file: Path) -> None:
    resolved = resolve([str(file)], {}, {})
    assert not [key for key, origin in resolved.origin.items() if origin.startswith("preset")]
    assert resolved.settings.global_batch_size is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_commands_are_real(file: Path) -> None:
    first, *_ = lines = file.read_text().splitlines()
    assert first.startswith(f"# shardwise train examples/{file.name}")
    flags = {f"--{key.replace('_', '-')}" for key in FIELDS} | {*ALONE, *PRINTERS}
    for command in [line.removeprefix("# ") for line in lines if line.startswith("# shardwise train ")]:
        words = shlex.split(command.partition(" > ")[0])[2:]
        assert words[0] == f"examples/{file.name}"
        assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_products_are_right(file: Path) -> None:
    """Comments like "8 GPUs x 2 samples x 4 micro-batches", and "16.1 GB of state per GPU"."""
    settings, text = of(file.name), file.read_text()
    num_ranks = int(settings.nnodes) * (settings.nproc_per_node or 1)
    product = re.search(r"(\d+) GPUs x (\d+) samples? x (\d+) micro-batches", text)
    if product:
        ranks, samples, micro_batches = map(int, product.groups())
        assert ranks * samples * micro_batches == settings.global_batch_size
        assert (ranks, samples) == (num_ranks, settings.per_device_train_batch_size)
    if settings.global_batch_size and settings.per_device_train_batch_size:
        assert settings.global_batch_size % (num_ranks * settings.per_device_train_batch_size) == 0
    for claim in re.findall(r"([\d.]+) GB of state per GPU", text):
        assert 16 * num_params(SHAPES[settings.model]) / num_ranks / 1e9 == pytest.approx(float(claim), abs=0.06)


def test_70b_on_fewer_gpus() -> None:
    text = (EXAMPLES / "finetune-70b-64gpu.yaml").read_text()
    total = 16 * num_params("llama-3-70b")
    for num_gpus, claim in ((32, "35 GB on 32"), (16, "71 GB on 16"), (4, "282 GB on 4")):
        assert f"{total / num_gpus / 1e9:.0f} GB on {num_gpus}" == claim
        assert claim in text
    assert "1.13 TB in all" in text
    assert round(total / 1e12, 2) == 1.13


def test_8b_on_one_gpu_and_its_host() -> None:
    """What it says of GPU and host is what the engine would take; of the other command, too."""
    settings, text = of("finetune-8b-1gpu.yaml"), (EXAMPLES / "finetune-8b-1gpu.yaml").read_text()
    assert isinstance(settings.strategy, str)
    assert f"16 bytes of a parameter: {16 * num_params('llama-3-8b') / 1e9:.1f} GB" in text
    num_micro = (settings.global_batch_size or 0) // (settings.per_device_train_batch_size or 1)
    sizes = {"seq": settings.seq_length, "micro_batch": settings.per_device_train_batch_size, "reduce": "bf16"}
    for strategy in (settings.strategy, "zero3-nvme"):
        found = plan(
            "llama-3-8b", make_cluster("1xA100-40GB", host_memory="200GB", disk="1TB"), strategy=strategy,
            num_micro_batches=num_micro, checkpointing=settings.gradient_checkpointing, **sizes,
        )  # fmt: skip
        assert isinstance(found, Plan)
        [entry] = found.found
        assert entry.fits, entry.why_not
        if strategy == settings.strategy:
            assert (entry.host_bytes - entry.spare_bytes) / 1e9 == pytest.approx(128.5, abs=0.1)


def test_1b_sees_as_many_tokens_as_it_says() -> None:
    settings = of("pretrain-1b.yaml")
    tokens = (settings.global_batch_size or 0) * (settings.seq_length or 0) * (settings.max_steps or 0)
    assert round(tokens / 1e9) == 25
    assert round(tokens / num_params("llama-3.2-1b")) == 20
    assert settings.seq_length == PRESETS["llama-3.2-1b"].shape["max_seq"]


def test_tiny_is_the_default_but_for_what_it_says() -> None:
    tiny, default = of("tiny-cpu.yaml"), resolve([], {}, {}).settings
    differ = {key for key in FIELDS if getattr(tiny, key) != getattr(default, key)}
    spelled_out = {"device", "nproc_per_node", "precision"}  # what follows on a machine without GPUs
    assert differ - spelled_out == {"strategy", "eval_steps", "save_steps", "save_total_limit"}
