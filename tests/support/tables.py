"""The table of a plan as text."""

from typing import Any

from shardwise.report.plan_facts import Plan
from shardwise.report.table import PLAIN, lines_of


def table(plan: dict[str, Any], width: int = PLAIN) -> str:
    return "\n".join(line.text for line in lines_of(Plan(plan), width))
