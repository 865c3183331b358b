"""Where a measurement was made."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .compare import Findings


def machine(findings: Findings) -> dict[str, Any]:
    answers = [a for seen in findings.outcomes.values() for outcome in seen for a in outcome.answers]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": answers[0]["device"] if answers else "unknown",
        "python": platform.python_version(),
        "torch": answers[0]["torch"] if answers else "unknown",
        "commit": commit(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Of the checkout that this file lies in, if it does."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "none"
    return asked.stdout.strip() or "none"
