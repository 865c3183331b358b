"""What is kept of a run that diverged, so that somebody can look into it: `diverged/` in the run folder.

report.json        the complaint, the last steps, the samples of the last one, parameters that are not finite
checkpoint/        weights and optimizer as they are now; the checkpoints before it are left alone
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.saving import save
from ..core.engine.guards import engine_of
from ..core.wire.collectives import Channel, exchange
from .loop import Ending, Job
from .step_records import Book, StepResult

FOLDER = "diverged"


def write_postmortem(
    folder: Path, ending: Ending, job: Job, book: Book, hosts: Channel, extra: Mapping[str, Any]
) -> Path:
    """All ranks call it; the first one writes the report."""
    names = sorted({name for part in exchange(hosts, _not_finite(job)) for name in part})
    place = folder / FOLDER
    if hosts.index == 0:
        place.mkdir(parents=True, exist_ok=True)
        report = {
            "complaint": ending.complaint,
            "last_steps": [_json_numbers(result) for result in book.last],
            "samples": job.samples_of(book.last[-1].step - 1),
            "parameters_not_finite": names,
        }
        (place / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    save(place / "checkpoint", job.model, job.optimizer, extra=extra)
    return place


def _json_numbers(result: StepResult) -> dict[str, float | None]:
    """JSON has no word for what is not a number."""
    values = dataclasses.asdict(result).items()
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values}


def _not_finite(job: Job) -> list[str]:
    """Parameters of which this rank's part has something in it that is not a number."""
    return [
        state.flat.params[index].name
        for unit in engine_of(job.model).units
        for state in unit.states
        for index, held in state.held.items()
        if not bool(state.master_part(held).isfinite().all())
    ]
