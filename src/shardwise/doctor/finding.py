"""One thing that was looked at. `grade` says whether a run works here, works worse than it could, or does not work."""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "worse", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    name: str
    value: str
    meaning: str
    grade: Grade = "ok"
    fix: str = ""  # where the grade is not ok


def size(num_bytes: float) -> str:
    """In the unit that leaves a number one can say."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
