"""`shardwise bench` from the outside: help, mistakes, and two real runs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench import compare
from shardwise.bench.compare import Session
from shardwise.cli import main
from shardwise.cli.bench import bench


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=300)


class Asked(Exception):  # noqa: N818, it carries what was understood
    def __init__(self, session: Session) -> None:
        self.session = session


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command line would run, without running it."""

    def understood(*arguments: str) -> Session:
        def stop(session: Session, *_: object) -> None:
            raise Asked(session)

        monkeypatch.setattr(compare, "run", stop)
        monkeypatch.setattr(sys, "argv", ["shardwise", "bench", *arguments])
        with pytest.raises(Asked) as asked:
            main()
        return asked.value.session

    return understood


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help_comes_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from shardwise.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
        "assert not any(name.startswith(('shardwise.bench', 'shardwise.core.engine')) for name in sys.modules)\n"
    )
    seen = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
    assert "bench" in seen.stdout


def examples() -> list[str]:
    text = (bench.__doc__ or "").replace("\\\n", "")
    return re.findall(r"shardwise bench (.+)", text)


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_are_understood(ask: Any, example: str) -> None:
    assert ask(*shlex.split(example)).settings


def test_everything_is_crossed(ask: Any) -> None:
    session = ask(
        *shlex.split(
            "--strategies zero3,ddp --peers fsdp2,fsdp1 --shape smoke,blocks-smoke --tokens 8,16 --fabric 2x4 "
            "--links 100,50 --reduce_dtype fp32,bf16 --precision bf16 --repetitions 3 --calls"
        )
    )
    assert len(session.settings) == 2 * 2 * 2 * 2
    assert len(session.cases) == 16 * 4 + 4 * 2
    assert {setting.shape.tokens for setting in session.settings} == {8, 16}
    assert {(setting.world_size, setting.node_size) for setting in session.settings} == {(8, 4)}
    assert (session.repetitions, session.count_calls) == (3, True)


def test_real_ranks_may_play_nodes(ask: Any) -> None:
    (setting,) = ask("--device", "cpu", "--world-size", "4", "--nproc-per-node", "2").settings
    assert (setting.world_size, setting.node_size, setting.fabric) == (4, 2, "")
    assert (setting.shape.name, setting.precision, setting.reduce) == ("50m", "fp32", "fp32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies zero4", "unknown strategy 'zero4'; did you mean"),
        ("""--strategies '{"layers.*":"zero2","*":"zero3"}'""", "'layers.*' matches no unit"),
        ("--peers fsdp22", "unknown peer 'fsdp22'; did you mean 'fsdp2'?"),
        ("--peers '' --strategies ''", "nothing to measure"),
        ("--shape llama-3-9b", "did you mean 'llama-3-8b'"),
        ("--tokens 1k", "--tokens: '1k' is not a whole number"),
        ("--fabric 2by8", "fabric '2by8': '2by8' is no shape"),
        ("--links 400", "--links 400 sets the speed of an emulated fabric"),
        ("--fabric 8 --links 5000 --device cpu", "intra=5000GB/s cannot be emulated"),
        ("--fabric 2x2,inter=1PB/s --device cpu", "inter=1e+06GB/s cannot be emulated"),
        ("--fabric 8 --links fast", "--links: 'fast' is not a number of GB/s"),
        ("--fabric 8 --world-size 2", "--fabric 8 has 8 ranks: leave --world-size out"),
        ("--world-size 4 --nproc-per-node 3", "--world-size 4 does not divide into nodes of --nproc-per-node 3"),
        ("--precision bf15", "--precision: unknown 'bf15'; did you mean 'bf16'?"),
        ("--reduce-dtype fp8", "--reduce-dtype: unknown 'fp8'"),
        ("--checkpointing some", "--checkpointing: unknown 'some'"),
        ("--device tpu", "--device: unknown 'tpu'"),
        ("--steps 0", "--steps"),
        ("--stepz 3", "--steps"),
    ],
)
def test_mistakes_are_told_and_end_with_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "bench", *shlex.split(arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.peers
def test_on_real_ranks(tmp_path: Path) -> None:
    seen = run(
        *shlex.split("bench --device cpu --shape smoke --strategies ddp --peers fsdp2 --world-size 2"),
        *shlex.split("--steps 2 --warmup 2 --out"),
        str(tmp_path),
    )
    assert "shardwise:ddp" in seen.stdout
    assert "vs fsdp2" in seen.stdout
    (file,) = tmp_path.glob("*-bench-smoke-2-ranks.json")
    about = json.loads(file.read_text())
    rows = {row["contender"]: row for row in about["rows"]}
    assert list(rows) == ["fsdp2", "shardwise:ddp"]
    for row in rows.values():
        assert (row["status"], row["compared_with"]) == ("ok", "one process")
        assert row["loss_difference"] < 1e-4
        assert len(row["losses"]) == 4
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    assert set(rows["shardwise:ddp"]["ratios"]) == {"fsdp2"}
    # An all-reduce of N ranks moves twice (N-1)/N of the gradients, and a few bytes on which ranks agree.
    num_params = 2 * 256 * 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64
    assert rows["shardwise:ddp"]["moved_bytes"] == pytest.approx(4 * num_params, rel=0.02)
    assert about["command"].startswith("shardwise bench --device cpu")


@pytest.mark.slow
def test_on_an_emulated_fabric() -> None:
    seen = run(
        *shlex.split("bench --device cpu --shape blocks-smoke --fabric 2x2,intra=1GB/s,inter=0.1GB/s --json"),
        *shlex.split("--strategies hsdp --peers ddp --precision pure-bf16 --reduce-dtype fp32 --steps 2 --warmup 2"),
        check=False,
    )
    rows = {row["contender"]: row for row in json.loads(seen.stdout)["rows"]}
    assert list(rows) == ["compute", "compute+update", "ddp", "shardwise:hsdp"]
    assert rows["ddp"]["status"] == "refused"
    assert "ddp reduces bf16 gradients as bf16" in rows["ddp"]["error"]
    assert seen.returncode == 1
    ours = rows["shardwise:hsdp"]
    assert ours["status"] == "ok"
    assert ours["wire_s"]["inter"] == pytest.approx(ours["wire_bytes"]["inter"] / 0.1e9)
    assert 0 < ours["wire_bytes"]["inter"] < ours["wire_bytes"]["intra"]
