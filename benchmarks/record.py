"""Results on disk: one dated JSON file and one markdown file per run, with the command and the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def command() -> str:
    """What to type to run this again."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join(["python", "-m", spec.name if spec else sys.argv[0], *sys.argv[1:]])


def markdown_table(rows: list[dict[str, Any]]) -> str:
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row[key]) for key in head) + " |" for row in rows])


def write(name: str, note: str, rows: list[dict[str, Any]], raw: Any, folder: Path = RESULTS) -> Path:
    """Write `<date>-<name>.json` (everything) and `.md` (the table); return the latter."""
    now = datetime.datetime.now()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{now:%Y-%m-%d-%H%M}-{name}"
    about = {"command": command(), "date": f"{now:%Y-%m-%d %H:%M}", "machine": machine(), "note": note}
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": rows, "raw": raw}, indent=1) + "\n")
    described = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    parts = [f"# {name}, {about['date']}", note, f"    {about['command']}", described, markdown_table(rows)]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    return stem.with_suffix(".md")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "none"
