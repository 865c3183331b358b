"""The package's names: all there, each when it is first used, and hidden by nothing."""

import subprocess
import sys

import shardwise as sw


def run(code: str) -> None:
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr


def test_every_name_is_there() -> None:
    assert {*sw._HOMES, "__version__"} == {*sw.__all__}
    assert all(getattr(sw, name) is not None for name in sw.__all__)
    assert {*sw.__all__} <= {*dir(sw)}


def test_importing_the_package_does_not_import_torch() -> None:
    run("import sys, shardwise; assert 'torch' not in sys.modules; shardwise.shard; assert 'torch' in sys.modules")


def test_a_module_of_the_same_name_hides_nothing() -> None:
    run("import shardwise.planner, shardwise.base.intervals; import shardwise as sw; assert callable(sw.shard)")
    run("from shardwise.base.intervals import Interval; from shardwise import shard; assert callable(shard)")
