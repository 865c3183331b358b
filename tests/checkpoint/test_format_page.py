"""The page on the format is enough to read a checkpoint: its reader is run as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.architecture.source import ROOT
from tests.harness import Pool

PAGE = ROOT / "docs" / "checkpoint-format.md"


def the_reader() -> dict[str, Any]:
    code = re.search(r"^## A reader$.*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert code
    found: dict[str, Any] = {}
    exec(code[1], found)  # noqa: S102  our own page
    return found


def save_both(path: Path) -> dict[str, torch.Tensor]:
    sw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 7, bias=False))
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()), "zero3", precision="fp32")
    model(torch.rand(4, 33)).sum().backward()
    optimizer.step()
    sw.save(path / "shards", model, optimizer)
    sw.save(path / "whole", model, optimizer, whole=True)
    moments = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    return sw.full_state_dict(model) | {f"moment on {dist.get_rank()}": moments.clone()}


def test_the_reader_of_the_page_reads_both_kinds(run_ranks: Pool, tmp_path: Path) -> None:
    expected, *_ = run_ranks(2, save_both, tmp_path)
    moments = expected.pop("moment on 0")
    reader = the_reader()
    for kind in ("shards", "whole"):
        seen = reader["read_model"](tmp_path / kind)
        assert set(seen) == set(expected)
        for name, value in expected.items():
            assert numpy.array_equal(seen[name], value.numpy()), name
        index = reader["read_index"](tmp_path / kind)
        state = index["tensors"]["0.weight"]["state"]["exp_avg"]
        found = reader["read_tensor"](tmp_path / kind, index, state)
        assert numpy.array_equal(found.reshape(-1)[: moments.numel()], moments.reshape(-1).numpy())
