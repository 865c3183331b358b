"""Folders like DeepSpeed's that cannot be read, and what its own runs on a CPU do not show. Its own: `test_peers`."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import CheckpointError
from shardwise.checkpoint.index import Stored
from shardwise.checkpoint.opened import open_checkpoint
from tests.checkpoint.by_hand import read_whole
from tests.harness import Pool

MODEL = "mp_rank_00_model_states.pt"
NUM_PARAMS = 80
ROW = torch.arange(3.0 * NUM_PARAMS)


def optimizer_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def adam(row: Tensor, **settings: Any) -> dict[str, Any]:
    state = {0: {"exp_avg": row + 1000, "exp_avg_sq": row + 2000}}
    return {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0], **settings}]}


def model_states() -> dict[str, Any]:
    shapes = OrderedDict((f"layers.{number}", torch.Size([3])) for number in range(NUM_PARAMS))
    return {
        "module": OrderedDict((name, torch.zeros(3)) for name in shapes) | {"seen": torch.tensor(4)},
        "buffer_names": ["seen"],
        "param_shapes": [shapes],
        "shared_params": {},
        "ds_version": "0.14.0",
        "global_steps": 5,
    }


def write(root: Path, num_ranks: int = 2, padding: int = 2, **settings: Any) -> Path:
    """One group of many small parameters, over which the ranks' parts are cut anywhere."""
    folder = root / "global_step5"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step5")
    torch.save(model_states(), folder / MODEL)
    padded = torch.cat([ROW, torch.full((padding,), float("nan"))])
    for rank, row in enumerate(padded.chunk(num_ranks)):
        lean = row[: row.numel() - padding * (rank == num_ranks - 1)]
        state = {
            "zero_stage": 2,
            "partition_count": [num_ranks],
            "single_partition_of_fp32_groups": [lean],
            "base_optimizer_state": adam(row, **settings),
        }
        torch.save({"optimizer_state_dict": state}, folder / optimizer_file(rank))
    return root


def rows(root: Path) -> dict[str, Tensor]:
    opened = open_checkpoint(root)
    found: dict[str, list[Tensor]] = {"weight": [], "exp_avg": [], "exp_avg_sq": []}
    with opened.reader() as reader:
        for name in model_states()["param_shapes"][0]:
            saved = opened.index.tensors[name]
            found["weight"].append(read_whole(reader, saved))
            for key in ("exp_avg", "exp_avg_sq"):
                item = saved.state[key]
                assert isinstance(item, Stored)
                found[key].append(read_whole(reader, item))
    return {key: torch.cat(parts) for key, parts in found.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 11])
def test_parameters_are_found_wherever_the_ranks_were_cut(tmp_path: Path, num_ranks: int) -> None:
    found = rows(write(tmp_path / "x", num_ranks))
    assert torch.equal(found["weight"], ROW)
    assert torch.equal(found["exp_avg"], ROW + 1000)
    assert torch.equal(found["exp_avg_sq"], ROW + 2000)


def test_both_folders_can_be_named(tmp_path: Path) -> None:
    root = write(tmp_path / "x")
    assert open_checkpoint(root) == open_checkpoint(root / "global_step5")
    assert open_checkpoint(root).index.extra == {"step": 5}


def test_steps_that_are_counted_in_the_group(tmp_path: Path) -> None:
    """As FusedAdam does it."""
    index = open_checkpoint(write(tmp_path / "x", step=7)).index
    assert index.tensors["layers.3"].state["step"] == 7
    assert index.optimizer is not None
    assert index.optimizer.groups == ({"lr": 0.5, "betas": [0.9, 0.99]},)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(3) for _ in range(NUM_PARAMS))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self) -> Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum()


def load_steps(root: Path) -> list[float]:
    sw.init()
    net = Net()
    model, optimizer = sw.shard(net, torch.optim.AdamW(net.parameters()), "ddp", precision="fp32")
    sw.load(root, model, optimizer)
    model().backward()
    optimizer.step()
    return [float(state["step"]) for state in optimizer.state.values()]


def test_they_go_on_in_torchs_own_adam(run_ranks: Pool, tmp_path: Path) -> None:
    assert set(run_ranks(1, load_steps, write(tmp_path / "x", step=7))[0]) == {8.0}


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


def test_padding_between_parameters(tmp_path: Path) -> None:
    root = write(tmp_path / "x", 1, 0)
    paddings = [[1] * (NUM_PARAMS // 4) + [0] * (NUM_PARAMS - NUM_PARAMS // 4)]

    def pad(value: Any) -> None:
        value["optimizer_state_dict"]["param_alignment_paddings"] = paddings

    change(root / "global_step5" / optimizer_file(0), pad)
    with pytest.raises(CheckpointError, match=r"'layers.* elements, and .* of them were written"):
        open_checkpoint(root)

    def shrink(value: Any) -> None:
        for name in list(value["param_shapes"][0])[NUM_PARAMS // 2 :]:
            del value["param_shapes"][0][name]
        paddings[0][NUM_PARAMS // 2 :] = []

    change(root / "global_step5" / MODEL, shrink)
    change(root / "global_step5" / optimizer_file(0), pad)
    opened = open_checkpoint(root)
    with opened.reader() as reader:
        third = read_whole(reader, opened.index.tensors["layers.2"])
    assert torch.equal(third, ROW[8:11])


def forget_a_rank(folder: Path) -> None:
    (folder / optimizer_file(0)).unlink()


def forget_the_last_rank(folder: Path) -> None:
    (folder / optimizer_file(1)).unlink()


def forget_the_model(folder: Path) -> None:
    (folder / MODEL).unlink()


def split_tensors(folder: Path) -> None:
    torch.save({}, folder / "mp_rank_01_model_states.pt")


def split_layers(folder: Path) -> None:
    torch.save({}, folder / "layer_01-model_00-model_states.pt")


def make_experts(folder: Path) -> None:
    torch.save({}, folder / "layer_0_expert_1_mp_rank_00_model_states.pt")


def lie_about_a_shape(folder: Path) -> None:
    change(folder / MODEL, lambda value: value["param_shapes"][0].update({"layers.0": torch.Size([1 << 50])}))


def shorten_the_state(folder: Path) -> None:
    def cut(value: Any) -> None:
        state = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = state["exp_avg"][:5].clone()

    change(folder / optimizer_file(0), cut)


def call_something(folder: Path) -> None:
    change(folder / MODEL, lambda value: value.update(client=print))


def truncate(folder: Path) -> None:
    path = folder / optimizer_file(1)
    path.write_bytes(path.read_bytes()[:-100])


def be_a_list(folder: Path) -> None:
    torch.save([1], folder / MODEL)


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank is missing": (forget_a_rank, r"of the ranks \[1\]: some are missing"),
    "the last rank is missing": (forget_the_last_rank, "2 ranks wrote it, and there are 1 files"),
    "no model": (forget_the_model, "no file of model states"),
    "tensor parallelism": (split_tensors, "mp_rank_01_model_states.pt is of tensor parallelism"),
    "pipeline": (split_layers, "is of pipeline or expert parallelism"),
    "experts": (make_experts, "is of pipeline or expert parallelism"),
    "a shape": (lie_about_a_shape, "'layers.0' has 1125899906842624 elements"),
    "short state": (shorten_the_state, "rank 0 wrote 121 elements of a group, and state of 5"),
    "a function": (call_something, r"names .*print, which is neither a tensor nor a plain container"),
    "truncated": (truncate, "truncated"),
    "a list": (be_a_list, "cannot be understood"),
}


@pytest.mark.parametrize("name", WRONG)
def test_folders_that_cannot_be_right_are_refused(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "x")
    spoil, words = WRONG[name]
    spoil(root / "global_step5")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(root)


@pytest.mark.parametrize("tag", ["../x", "", "/etc", "global_step9", "\0"])
def test_a_latest_that_leads_nowhere_is_refused(tmp_path: Path, tag: str) -> None:
    root = write(tmp_path / "x")
    (root / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="latest names"):
        open_checkpoint(root)
