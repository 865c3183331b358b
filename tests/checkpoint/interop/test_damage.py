"""Whatever has happened to the files of another library's checkpoint: one CheckpointError, or it is read."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise import CheckpointError
from shardwise.checkpoint.opened import open_checkpoint
from tests.checkpoint.by_hand import read_whole
from tests.checkpoint.interop import test_deepspeed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write_dcp(path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=torch.tensor(0.25))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path, no_dist=True)


def write_hugging_face(path: Path) -> None:
    path.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, path / f"{name}.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}')


def write_deepspeed(path: Path) -> None:
    test_deepspeed.write(path)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    for write in (write_dcp, write_hugging_face, write_deepspeed):
        write(root / write.__name__)
        open_checkpoint(root / write.__name__)
    return root


@pytest.mark.parametrize("write", [write_dcp, write_hugging_face, write_deepspeed], ids=lambda write: write.__name__)
def test_damaged_folders_are_refused_or_read(samples: Path, write: Callable[[Path], None]) -> None:
    good = samples / write.__name__
    names = sorted(path.relative_to(good).as_posix() for path in good.rglob("*") if path.is_file())
    here = samples / f"damaged {write.__name__}"
    shutil.copytree(good, here)

    @given(st.data())
    @settings(max_examples=80, deadline=None)
    def damage(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        content = bytearray((good / name).read_bytes())
        # Pickles and directories are at both ends; the middle is numbers.
        last = len(content) - 1
        places = st.one_of(st.integers(0, min(2000, last)), st.integers(max(0, last - 1500), last))
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(places)] = data.draw(st.integers(0, 255))
        length = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
        (here / name).write_bytes(content[:length])
        try:
            with suppress(CheckpointError):
                opened = open_checkpoint(here)
                with opened.reader() as reader:
                    for _, stored in opened.index.every_stored():
                        if stored.num_bytes < 1 << 20:
                            read_whole(reader, stored)
        finally:
            shutil.copy(good / name, here / name)

    damage()
