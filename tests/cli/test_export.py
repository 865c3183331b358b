"""`shardwise export` from the outside: what it refuses, what it leaves, and the memory it takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.trainer.model import Transformer
from shardwise.trainer.settings import Settings
from shardwise.trainer.shapes import TransformerShape
from tests.checkpoint.by_hand import save_by_hand
from tests.cli.asking import Asker

SHAPE = {"vocab": 257, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40, "max_seq": 32, "tied": True}


def saved_run(run: Path, shape: dict[str, int | bool]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Transformer(TransformerShape(**shape))  # type: ignore[arg-type]
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    tied = {"embed.weight": ("head.weight",)} if shape["tied"] else {}
    save_by_hand(run / "checkpoints" / "step-000002", tensors, tied=tied, with_optimizer=False)
    (run / "config.json").write_text(Settings(model="tiny", shape=shape).to_json())
    return tensors


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saved_run(tmp_path / "run", SHAPE)
    return tmp_path / "run"


def test_the_newest_checkpoint_of_a_run_is_exported(ask: Asker, run: Path, tmp_path: Path) -> None:
    seen = ask("export", run, tmp_path / "out", "--max_shard_size", "10KB", "--dtype", "bf16")
    assert (seen.code, seen.err) == (0, "")
    assert re.fullmatch(r".*out: the model of .*step-000002, [\d.]+ kB, in [\d.]+ s\n", seen.out)
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in weight_map.items()}
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    files = sorted(set(weight_map.values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        values = load_file(tmp_path / "out" / file).values()
        assert len(values) == 1 or sum(value.nbytes for value in values) <= 10_000


def test_what_is_there_is_replaced_only_if_it_is_ours(ask: Asker, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert ask("export", run, out).code == 0
    (out / "shardwise.json").unlink()
    (out / "mine.txt").write_text("mine")
    seen = ask("export", run, out)
    assert seen.code == 2
    assert "--overwrite" in seen.err
    assert (out / "mine.txt").is_file()
    assert ask("export", run, out, "--overwrite").code == 0
    assert not (out / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_what_is_read_is_never_replaced(ask: Asker, run: Path) -> None:
    for out in (run, run / "checkpoints", run / "checkpoints" / "step-000002"):
        seen = ask("export", run, out, "--overwrite")
        assert seen.code == 2
        assert "is read from it" in seen.err
    assert ask("verify", run).code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--dtype", "bf61"), "did you mean 'bf16'?"),
        (("--max-shard-size", "big"), "'big' is not a size; write 5GB"),
        (("--max-shard-size", "0"), "'0' is not a size"),
        (("--merge",), "no adapters to merge"),
        (("--model", "nowhere/at/all"), "there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    ask: Asker, run: Path, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    seen = ask("export", run, tmp_path / "out", *words)
    assert (seen.code, seen.out) == (2, "")
    assert complaint in seen.err
    assert seen.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_damage_is_found_and_nothing_is_left(ask: Asker, run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-000002" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    seen = ask("export", run, tmp_path / "out")
    assert seen.code == 5
    assert "is damaged" in seen.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# How far the resident memory rises while the second run is exported. The first one is small: it loads the libraries.
MEASURING = """
import sys, threading, time
from shardwise.cli import app

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def watch():
    global highest
    while not done:
        highest = max(highest, resident())
        time.sleep(0.002)

small, large, out = sys.argv[1:]
app(["export", small, out], standalone_mode=False)
before, highest, done = resident(), 0, False
watcher = threading.Thread(target=watch)
watcher.start()
app(["export", large, out, "--max-shard-size", "50MB"], standalone_mode=False)
done = True
watcher.join()
print(highest - before)
"""


@pytest.mark.slow
def test_memory_of_less_than_a_file(run: Path, tmp_path: Path) -> None:
    """200 MB in files of 50 MB; resident memory is looked at every 2 ms."""
    shape = {**SHAPE, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 4096, "layers": 6, "vocab": 8000}
    tensors = saved_run(tmp_path / "large", shape)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 190e6
    words = [str(run), str(tmp_path / "large"), str(tmp_path / "out")]
    seen = subprocess.run([sys.executable, "-c", MEASURING, *words], capture_output=True, text=True, check=True)
    assert int(seen.stdout.splitlines()[-1]) < 50e6, seen.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 4


def test_help_shows_commands_that_parse(ask: Asker) -> None:
    seen = ask("export", "--help")
    assert seen.code == 0
    for word in ("--model", "--merge", "--dtype", "--max-shard-size", "--overwrite", "shardwise export runs/"):
        assert word in seen.out
