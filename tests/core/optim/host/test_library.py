"""The C is compiled once, by whoever comes first, and nothing is loaded that others could have written."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.core.native import library as host_library
from shardwise.core.native.adamw import AdamSettings, AdamUpdate, Moment8, adamw
from shardwise.core.native.cores import cores_for
from shardwise.core.native.library import BuildError, build, load

SETTINGS = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False, fused=True, step=1)
UPDATE = """
import torch
from shardwise.core.native.adamw import AdamSettings, AdamUpdate, adamw
from shardwise.core.native.cores import cores_for
from shardwise.core.native.library import library
assert library() is not None
tensors = [torch.ones(1000) for _ in range(4)]
settings = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False, fused=True, step=1)
adamw(AdamUpdate(*tensors, None, settings, 1.0), cores_for(0, 1))
print(tensors[0].double().sum().item())
"""


@pytest.fixture
def _unloaded() -> Iterator[None]:
    """As in a process that has not asked for the library yet."""
    host_library.library.cache_clear()
    yield
    host_library.library.cache_clear()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def copied(file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(file, tmp_path))


@pytest.mark.slow
def test_processes_that_build_at_once_share_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranks = [subprocess.Popen([sys.executable, "-c", UPDATE], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = {rank.communicate()[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(results) == 1
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert file.suffix == ".so"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_not_built_again(file: Path) -> None:
    written = file.stat().st_mtime_ns
    assert build(file.parent) == file
    assert file.stat().st_mtime_ns == written


def test_what_others_can_write_is_not_loaded(copied: Path) -> None:
    copied.chmod(0o666)
    with pytest.raises(BuildError, match=r"has owner \d+ and mode 666, and must be this user's"):
        load(copied)
    copied.chmod(0o600)
    copied.parent.chmod(0o777)
    with pytest.raises(BuildError, match="mode 777"):
        load(copied)


def test_what_is_another_users_is_not_loaded(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = copied.stat().st_uid
    monkeypatch.setattr(host_library.os, "getuid", lambda: owner + 1)
    with pytest.raises(BuildError, match=rf"has owner {owner} and .* this user's \({owner + 1}\)"):
        load(copied)


@pytest.mark.usefixtures("_unloaded")
def test_without_a_compiler_torch_does_it_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_library, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert host_library.library() is None
        weights, grad, out = torch.ones(300), torch.ones(300, dtype=torch.bfloat16), torch.empty(300).half()
        update = AdamUpdate(weights, torch.zeros(300), torch.zeros(300), grad, out, SETTINGS, 1.0)
        adamw(update, cores_for(0, 1))
    (record,) = caplog.records
    assert "no C compiler among no-such-compiler" in record.getMessage()
    assert out.equal(weights.half())
    assert (weights < 1).all()


@pytest.mark.usefixtures("_unloaded")
def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host_library, "FLAGS", ("-march=no-such-machine",))
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert host_library.library() is None
    assert "no-such-machine" in caplog.records[0].getMessage()
    assert not list((tmp_path / "shardwise").iterdir())


@pytest.mark.usefixtures("_unloaded")
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert host_library.library() is None
    assert "XDG_CACHE_HOME" in caplog.records[0].getMessage()


@pytest.mark.quick("flags0")
@pytest.mark.parametrize("flags", [("-march=x86-64",), ("-march=x86-64-v3",)])
@pytest.mark.usefixtures("_unloaded")
def test_older_processors_get_the_same_results(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no instructions for it is done in plain C, and rounded the same."""
    if host_library.platform.machine() != "x86_64":
        pytest.skip("flags of another processor")
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(3001, generator=generator).to(dtype) for dtype in (torch.float32, torch.float16)]
    lookup = (torch.arange(256) - 127) / 128

    def updated() -> list[torch.Tensor]:
        weights, moments, out = torch.ones(3001), [torch.zeros(3001) for _ in range(2)], torch.empty(3001).half()
        codes, scales = [torch.zeros(3001).byte() for _ in range(2)], [torch.zeros(12) for _ in range(2)]
        for grad in grads:
            adamw(AdamUpdate(weights, *moments, grad, out, SETTINGS, 0.5), cores_for(0, 1))
            moments8 = (Moment8(*each, lookup) for each in zip(codes, scales, strict=True))
            adamw(AdamUpdate(weights, *moments8, grad, out, SETTINGS, 0.5), cores_for(0, 1))
        return [weights, *moments, out, *codes, *scales]

    here = updated()
    rest = [flag for flag in host_library.FLAGS if not flag.startswith("-march")]
    monkeypatch.setattr(host_library, "FLAGS", (*flags, *rest))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host_library.library.cache_clear()
    assert host_library.library() is not None
    assert list(tmp_path.rglob("*.so"))
    assert all(one.equal(other) for one, other in zip(here, updated(), strict=True))
