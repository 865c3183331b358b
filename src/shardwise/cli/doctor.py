"""`shardwise doctor`: what this machine can do, and what stands in the way."""

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..doctor.finding import Finding

WIDTH = 100
INDENT = 22
MARKS = {"ok": " ", "worse": "!", "broken": "X"}


def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs would write; its disk is measured.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON to the standard output.")] = False,
) -> None:
    """Look at versions, GPUs, memory, limits, disk and network.

    Each line says what it means. Marked ! is what works worse than it
    could, marked X what does not work; then the exit code is 1.

        shardwise doctor

        shardwise doctor --folder /scratch/runs --json
    """
    from ..doctor import software

    findings = list(software.look())
    if all(software.installed(package) for package in ("torch", "psutil")):
        findings += _with_torch()
    from ..doctor import disk

    findings += disk.look(folder)
    print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1) if as_json else _text(findings))
    raise typer.Exit(1 if any(finding.grade == "broken" for finding in findings) else 0)


def _with_torch() -> "Iterable[Finding]":
    import torch

    from ..doctor import devices, limits, network

    num_gpus = torch.cuda.device_count()
    yield from devices.look()
    yield from limits.look(num_gpus)
    yield from network.look(os.environ, num_gpus)


def _text(findings: "list[Finding]") -> str:
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines += ["", topic]
        line = f"{MARKS[finding.grade]} {finding.name:<{INDENT - 2}}{finding.value}"
        if len(line) + 3 + len(finding.meaning) <= WIDTH:
            lines.append(f"{line} - {finding.meaning}")
        else:
            lines += [line, *_wrapped(finding.meaning)]
        if finding.fix:
            lines += _wrapped(f"-> {finding.fix}")
    num_worse, num_broken = (sum(finding.grade == grade for finding in findings) for grade in ("worse", "broken"))
    if num_broken:
        last = f"{num_broken} marked X: that will not work here. {num_worse} marked !: that could be better."
    else:
        last = f"Runs work here. {num_worse} marked !: that could be better." if num_worse else "Runs work here."
    return "\n".join([*lines[1:], "", last])


def _wrapped(text: str) -> list[str]:
    space = " " * INDENT
    return textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space)
