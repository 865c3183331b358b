"""On a GPU: what doctor measures of it is near what the table says."""

from pathlib import Path

import pytest
import torch

from shardwise.doctor.measure import measure
from shardwise.planner.hardware.cluster import cluster_in, efficiency_in
from shardwise.planner.hardware.gpus import gpu_of_device

pytestmark = pytest.mark.gpu


def test_a_gpu_reaches_some_of_its_data_sheet(tmp_path: Path) -> None:
    found = measure(tmp_path)
    known = gpu_of_device(torch.cuda.get_device_name(0))
    assert cluster_in(found).world_size == torch.cuda.device_count()
    assert found.to_host_bytes_per_s is not None
    if known is None:
        pytest.skip(f"the table has no {found.device}")
    assert found.memory_bytes == pytest.approx(known.memory_bytes, rel=0.01)
    assert 0.4 * known.flops < found.flops < known.flops
    assert 0.5 * known.hbm_bytes_per_s < found.memory_bytes_per_s < known.hbm_bytes_per_s
    assert 0.4 < efficiency_in(found).products <= 1.0
