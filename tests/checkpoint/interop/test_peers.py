"""Checkpoints that torch's FSDP2 with DCP, Accelerate and DeepSpeed wrote are loaded here, and training goes on.

The peer's next losses are ours: bit for bit where its arithmetic is, and else to 1e-5. Under which strategy and on how
many ranks makes no difference.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.index import Stored
from shardwise.checkpoint.opened import Opened, open_checkpoint
from tests.checkpoint.by_hand import read_whole
from tests.checkpoint.interop import peers
from tests.checkpoint.interop.peers import Peer
from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed

pytestmark = pytest.mark.peers

TOLERANCE = 1e-5
FSDP2 = {"nested": "torch DCP", "flat": "torch DCP", "accelerate": "Accelerate, torch DCP", "gathered": "Accelerate"}


@pytest.fixture(scope="module")
def fsdp2(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Peer]:
    root = tmp_path_factory.mktemp("fsdp2")
    return root, run_ranks(2, peers.run_fsdp2, root)[0]


def assert_holds(opened: Opened, peer: Peer) -> None:
    """Every tensor that the peer had, bit for bit, and nothing else."""
    tensors = opened.index.tensors
    assert set(tensors) == set(peer.weights)
    with opened.reader() as reader:
        for name, saved in tensors.items():
            assert torch.equal(read_whole(reader, saved), peer.weights[name]), name
            assert set(saved.state) == set(peer.state.get(name, {})), name
            for key, item in saved.state.items():
                assert isinstance(item, Stored)
                assert torch.equal(read_whole(reader, item), peer.state[name][key]), (name, key)


@pytest.mark.parametrize("name", FSDP2)
def test_what_fsdp2_saved_is_what_is_read(fsdp2: tuple[Path, Peer], name: str) -> None:
    root, peer = fsdp2
    opened = open_checkpoint(root / name)
    assert_holds(opened, peer)
    index = opened.index
    assert index.origin["format"] == FSDP2[name]
    assert index.optimizer is not None
    assert [(group["lr"], group["weight_decay"]) for group in index.optimizer.groups] == [(5e-3, 0.1), (2e-3, 0.0)]
    assert {name: saved.group for name, saved in index.tensors.items()} == {
        name: None if name not in peer.state else int(value.ndim <= 1) for name, value in peer.weights.items()
    }


@pytest.mark.parametrize(
    ("name", "world", "strategy"),
    [("nested", 2, "zero1"), ("flat", 2, "zero3"), ("accelerate", 2, "ddp"), ("gathered", 2, "zero2")],
)
def test_fsdp2_goes_on_bit_for_bit(
    run_ranks: Pool, fsdp2: tuple[Path, Peer], name: str, world: int, strategy: str
) -> None:
    root, peer = fsdp2
    assert run_ranks(world, peers.go_on, root / name, strategy)[0] == peer.losses


@pytest.mark.parametrize(("name", "world", "strategy"), [("accelerate", 1, "ddp"), ("nested", 3, "zero3")])
def test_fsdp2_goes_on_on_other_worlds(
    run_ranks: Pool, fsdp2: tuple[Path, Peer], name: str, world: int, strategy: str
) -> None:
    root, peer = fsdp2
    assert run_ranks(world, peers.go_on, root / name, strategy)[0] == pytest.approx(peer.losses, rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore")  # it is deprecated
def test_fsdp1_goes_on_bit_for_bit(run_ranks: Pool, tmp_path: Path) -> None:
    losses = run_ranks(2, peers.run_fsdp1, tmp_path / "here")[0]
    assert run_ranks(2, peers.go_on, tmp_path / "here", "zero2")[0] == losses


# ---------------------------------------------------------------------------------------------------------
# DeepSpeed


@pytest.fixture(scope="module")
def deepspeed(on_deepspeed: DeepSpeed, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Peer]]:
    root = tmp_path_factory.mktemp("deepspeed")
    return root, on_deepspeed(peers.run_deepspeed, root)


# Its import alone warns of a dozen deprecations.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero1-bf16", "zero2-bf16", "zero3-bf16"])
def test_what_deepspeed_saved_is_what_is_read(deepspeed: tuple[Path, dict[str, Peer]], name: str) -> None:
    root, peer = deepspeed
    opened = open_checkpoint(root / name)
    bare = {name: replace(saved, state={}) for name, saved in opened.index.tensors.items()}
    assert_holds(replace(opened, index=replace(opened.index, tensors=bare)), peer[name])
    tensors = opened.index.tensors
    assert tensors["embed.weight"].tied == ("head.weight",)
    assert (tensors["blocks.1.down.weight"].is_trained, tensors["embed.weight"].is_trained) == (False, True)
    assert {name for name, saved in tensors.items() if saved.kind == "buffer"} == {"scale", "seen"}
    assert opened.index.origin["format"] == f"DeepSpeed ZeRO-{name[4]}"
    assert opened.index.optimizer is not None
    assert [group["lr"] for group in opened.index.optimizer.groups] == [5e-3, 2e-3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_deepspeeds_adam_is_found(run_ranks: Pool, deepspeed: tuple[Path, dict[str, Peer]], name: str) -> None:
    root, _ = deepspeed
    alone = run_ranks(1, peers.run_alone)[0]
    opened = open_checkpoint(root / name)
    with opened.reader() as reader:
        for param, saved in opened.index.tensors.items():
            state = {key: read_whole(reader, item) for key, item in saved.state.items() if isinstance(item, Stored)}
            assert set(state) == set(alone.state.get(param, {}))
            for key, value in state.items():
                torch.testing.assert_close(value, alone.state[param][key], rtol=1e-4, atol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_deepspeed_without_zero_is_weights_alone(deepspeed: tuple[Path, dict[str, Peer]]) -> None:
    root, _ = deepspeed
    index = open_checkpoint(root / "zero0").index
    assert index.optimizer is None
    assert "optimizer" in index.origin["left out"]
    assert set(index.tensors) == set(peers.fresh().state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "strategy"), [("zero1", "zero3"), ("zero2", "ddp"), ("zero3", "zero2")])
def test_deepspeed_goes_on_bit_for_bit(
    run_ranks: Pool, deepspeed: tuple[Path, dict[str, Peer]], name: str, strategy: str
) -> None:
    root, peer = deepspeed
    assert run_ranks(2, peers.go_on, root / name, strategy)[0] == peer[name].losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "world", "strategy"), [("zero1", 3, "ddp"), ("zero2", 1, "ddp"), ("zero3", 3, "zero1")]
)
def test_deepspeed_goes_on_on_other_worlds(
    run_ranks: Pool, deepspeed: tuple[Path, dict[str, Peer]], name: str, world: int, strategy: str
) -> None:
    root, peer = deepspeed
    assert run_ranks(world, peers.go_on, root / name, strategy)[0] == pytest.approx(peer[name].losses, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_deepspeed_in_bf16_goes_on(run_ranks: Pool, deepspeed: tuple[Path, dict[str, Peer]]) -> None:
    """From the same masters; it casts other things than we do."""
    root, peer = deepspeed
    losses = run_ranks(2, peers.go_on, root / "zero3-bf16", "zero2", "bf16")[0]
    assert losses == pytest.approx(peer["zero3-bf16"].losses, rel=1e-3)
