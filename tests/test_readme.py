"""README is short, and its code runs."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.core.layout import ALIASES, PRESETS
from tests.harness import Pool

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """The lines of shell blocks that call shardwise, without their comments."""
    lines = [line.partition(" #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("shardwise ")]


def run_block(source: str) -> float:
    found: dict[str, Any] = {}
    exec(source, found)  # noqa: S102  our own README
    return float(found["loss"].detach())


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("source", blocks("python"))
def test_python_blocks_run(run_ranks: Pool, source: str) -> None:
    assert all(math.isfinite(loss) for loss in run_ranks(2, run_block, source))


@pytest.mark.parametrize("command", commands())
def test_commands_take_their_flags(command: str, tmp_path: Path) -> None:
    verb, *words = shlex.split(command)[1:]
    if verb == "plan":
        words = [str(tmp_path / "plan.html") if word.endswith(".html") else word for word in words]
        assert CliRunner().invoke(app, [verb, *words]).exit_code == 0
    else:
        told = CliRunner().invoke(app, [verb, "--help"], terminal_width=200).output
        assert all(word in told for word in words if word.startswith("--"))


def test_the_table_of_presets_is_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \((.*?)\))? \| (.*?) \| (.*?) \| (.*?) \| (\w+) \|$", README, re.MULTILINE)
    table = {name: (params, grads, optimizer, until) for name, _, params, grads, optimizer, until in rows}
    assert set(table) == set(PRESETS)
    for name, answers in table.items():
        layout = PRESETS[name]
        said = tuple(re.match(r"\w+", answer)[0] for answer in answers)  # type: ignore[index]
        assert said == (layout.params, layout.grads, layout.optimizer, layout.gathered_until)
    named = {alias for _, others, *_ in rows for alias in re.findall(r"`([^`]+)`", others)}
    assert named <= {*ALIASES}
