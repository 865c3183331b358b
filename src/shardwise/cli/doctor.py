"""`shardwise doctor`: check this machine, measure it, and explain why a run ran out of memory."""

import dataclasses
import json
import os
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..base.errors import ConfigurationError
from ..base.text import plural
from .shared import documented, say

if TYPE_CHECKING:
    from ..doctor import Finding

WIDTH = 100
INDENT = 22
MARKS = {"ok": " ", "worse": "!", "broken": "X"}


app = typer.Typer()


@app.callback(invoke_without_command=True)
@documented
def doctor(
    context: typer.Context,
    folder: Path = Path("runs"),
    as_json: bool = False,
    measure: Path | None = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if measure is not None:
        _measure(measure, folder, as_json)
        return
    from ..doctor import software

    findings = list(software.look())
    if all(software.installed(package) for package in ("torch", "psutil")):
        from ..doctor import machine

        findings += machine.look(os.environ)
    from ..doctor import disk

    findings += disk.look(folder)
    print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1) if as_json else _text(findings))
    raise typer.Exit(1 if any(finding.grade == "broken" for finding in findings) else 0)


@app.command()
@documented
def oom(
    folder: Path,
    as_json: bool = False,
) -> None:
    from ..trainer.run_folder import CONFIG, oom_reports

    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: there is no such folder; give one that `shardwise train` made")
    reports = oom_reports(folder)
    if not reports:
        is_run = (folder / CONFIG).is_file()
        why = "no rank of its last start ran out of memory" if is_run else f"it is no run folder: it has no {CONFIG}"
        raise ConfigurationError(f"{folder}: {why}")
    if as_json:
        say(*json.dumps(reports, indent=1).split("\n"))
        return
    first, *others = reports  # they are ordered by time
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first["time"]))
    except (OverflowError, OSError, ValueError, TypeError):
        raise ConfigurationError(f"{folder}: the time {first['time']!r} in a rank's report is none") from None
    say(f"{folder}, {when}", *str(first["text"]).split("\n"))
    if others:
        ranks = ", ".join(str(report["rank"]) for report in others)
        say(f"  {plural(len(others), 'more rank')} failed after it: {ranks}; --json shows all")


def _measure(file: Path, folder: Path, as_json: bool) -> None:
    from ..planner.hardware.cluster import write_measured

    _require_writable(file)
    from ..doctor.measure import measure

    began_s = time.monotonic()
    found = measure(folder)
    write_measured(found, file)
    if as_json:
        print(file.expanduser().read_text(), end="")
        return
    rows = {
        "products, 16 bits": ("flops", 1e12, "TFLOP/s"),
        "products, fp32": ("fp32_flops", 1e12, "TFLOP/s"),
        "memory": ("memory_bytes", 1e9, "GB"),
        "its bandwidth": ("memory_bytes_per_s", 1e9, "GB/s"),
        "to the host": ("to_host_bytes_per_s", 1e9, "GB/s"),
        "from the host": ("from_host_bytes_per_s", 1e9, "GB/s"),
        "gathering": ("gather_bytes_per_s", 1e9, "GB/s of bus bandwidth"),
        "all-reducing": ("all_reduce_bytes_per_s", 1e9, "GB/s of bus bandwidth"),
        "latency of both": ("collective_latency_us", 1, "us"),
        "host memory": ("host_memory_bytes", 1e9, "GB"),
        "updates on the host": ("host_adam_elems_per_s", 1e9, "billion parameters/s"),
        "disk, free": ("disk_bytes", 1e9, "GB"),
        "disk, read": ("disk_read_bytes_per_s", 1e9, "GB/s"),
        "disk, write": ("disk_write_bytes_per_s", 1e9, "GB/s"),
    }
    print(f"{found.num_devices} x {found.device}, measured in {time.monotonic() - began_s:.1f} s, for plans: {file}")
    for name, (key, unit, word) in rows.items():
        value = getattr(found, key)
        print(f"  {name:<{INDENT - 2}}{'not measured' if value is None else f'{value / unit:.3g} {word}'}")


def _require_writable(file: Path) -> None:
    """Raise ConfigurationError if the result could not be written, before it is measured."""
    try:
        file = file.expanduser()
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"--measure: {str(file)!r} cannot be written ({error}): name a file in a folder that exists"
        ) from None


def _text(findings: "list[Finding]") -> str:
    wrapped = partial(textwrap.wrap, width=WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)
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
            lines += [line, *wrapped(finding.meaning)]
        lines += wrapped(f"-> {finding.fix}") if finding.fix else []
    num_worse, num_broken = (sum(finding.grade == grade for finding in findings) for grade in ("worse", "broken"))
    last = f"{num_broken} marked X: does not work here." if num_broken else "Runs work here."
    if num_broken or num_worse:
        last += f" {num_worse} marked !: could be better."
    return "\n".join([*lines[1:], "", last])
