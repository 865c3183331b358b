"""Why a run has ended for lack of memory, told again from what its ranks have left in the run folder."""

import time
from pathlib import Path
from typing import Any

from ..base.errors import ConfigurationError
from ..base.text import plural
from ..trainer.run_folder import CONFIG, oom_reports


def look(folder: Path) -> list[dict[str, Any]]:
    """The reports, the first rank to fail first."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: there is no such folder; give one that `shardwise train` made")
    found = oom_reports(folder)
    if not found:
        is_run = (folder / CONFIG).is_file()
        why = "no rank of its last start ran out of memory" if is_run else f"it is no run folder: it has no {CONFIG}"
        raise ConfigurationError(f"{folder}: {why}")
    return found


def text(folder: Path, reports: list[dict[str, Any]]) -> str:
    first, *others = reports
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first["time"]))
    except (OverflowError, OSError, ValueError, TypeError):
        raise ConfigurationError(f"{folder}: the time {first['time']!r} in a rank's report is none") from None
    lines = [f"{folder}, {when}", str(first["text"])]
    if others:
        ranks = ", ".join(str(report["rank"]) for report in others)
        lines.append(f"  {plural(len(others), 'more rank')} failed after it: {ranks}; --json shows all")
    return "\n".join(lines)
