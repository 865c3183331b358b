"""Checks of this machine, measured rather than assumed: each finding says what it means and, where bad, the fix."""

from dataclasses import dataclass
from typing import Literal

# A run works here, works worse than it could, or does not work.
Grade = Literal["ok", "worse", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    topic: str
    name: str
    value: str
    meaning: str
    grade: Grade = "ok"
    fix: str = ""  # unless the grade is ok


def judged(topic: str, name: str, value: str, meaning: str, fix: str, grade: Grade = "worse") -> Finding:
    """A finding that is ok if there is nothing to fix."""
    return Finding(topic, name, value, meaning, grade if fix else "ok", fix)


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
