"""What `planner_auto` measured, as a table: who was chosen, against the best preset that fits and against zero3. Pure.

python -m benchmarks.planner_auto_table FILE.json > FILE.md
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

COLUMNS = (
    "setting", "room", "may use", "auto chose", "predicted", "auto", "uses", "best preset", "auto / best",
    "zero3 / auto",
)  # fmt: skip


def is_ok(contender: Answer) -> bool:
    return all(seen["status"] == "ok" for seen in contender["rounds"])


def step_s(contender: Answer) -> float:
    """The median of all steps."""
    return statistics.median(each for seen in contender["rounds"] for each in seen["steps_s"])


def peak(contender: Answer, kind: str) -> int:
    """0 where there is no allocator to ask."""
    return max(seen["peak"].get(f"{kind}_peak", 0) for seen in contender["rounds"])


def fitting(auto: Answer, presets: Sequence[Answer]) -> list[Answer]:
    """Presets that ran in the room of `auto`, or, where the planner saw no doubt, that reserved no more elsewhere.
    Without an allocator, by what is planned."""
    limit_bytes = auto["limit_bytes"]
    held = {preset["preset"]: preset for preset in auto["held"]}
    found = [held.get(preset["preset"], preset) for preset in presets]
    return [
        preset
        for preset in found
        if is_ok(preset) and (peak(preset, "reserved") or preset.get("needed_bytes", 0)) <= limit_bytes
    ]


def ratios(above: Answer, below: Answer) -> list[float]:
    """Within rounds, so that drift counts little."""
    pairs = zip(above["rounds"], below["rounds"], strict=True)
    return [statistics.median(one["steps_s"]) / statistics.median(other["steps_s"]) for one, other in pairs]


def rows(document: Answer) -> list[Answer]:
    found = []
    for setting in document["settings"]:
        by_name = {preset["preset"]: preset for preset in setting["presets"]}
        for auto in setting["autos"]:
            limit = auto["limit_bytes"]
            rivals = fitting(auto, setting["presets"])
            row: Answer = {"setting": setting["name"], "room": auto["room"], "limit_bytes": limit}
            found.append(row)
            if not is_ok(auto) or not rivals:
                row["error"] = next((seen["error"] for seen in auto["rounds"] if seen["status"] != "ok"), "no preset")
                continue
            best = min(rivals, key=step_s)
            row |= {
                "choices": sorted({seen["chosen"]["choice"] for seen in auto["rounds"]}),
                "auto_s": step_s(auto),
                "predicted_s": auto["rounds"][0]["chosen"]["predicted_s"],
                "reserved": peak(auto, "reserved"),
                "allocated": peak(auto, "allocated"),
                "best": best["preset"],
                "best_s": step_s(best),
                "of_best": step_s(auto) / step_s(best),
                "of_best_rounds": ratios(auto, best),
            }
            if "zero3" in by_name and is_ok(by_name["zero3"]):
                row["zero3"] = step_s(by_name["zero3"]) / step_s(auto)
                row["zero3_rounds"] = ratios(by_name["zero3"], auto)
    return found


def table(document: Answer) -> str:
    lines = [
        f"# strategy auto against every preset, {document['date']}",
        "",
        "Milliseconds a step, the median of all steps. `auto / best`: auto's time over that of the fastest preset that "
        "fits into the memory (1 or less: never slower); `zero3 / auto`: how many times as fast as zero3. In brackets: "
        "the same within each round, least and most. `predicted`: what the planner expected of its choice.",
        "",
        f"    {document['command']}",
        "",
        ", ".join(f"{key} {value}" for key, value in document["machine"].items() if value is not None),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    found = rows(document)
    for row in found:
        if "error" in row:
            lines.append(
                f"| {row['setting']} | {row['room']} | {_gb(row['limit_bytes'])} | {row['error']} |" + " |" * 6
            )
            continue
        zero3 = f"{row['zero3']:.2f} {_span(row['zero3_rounds'])}" if "zero3" in row else ""
        lines.append(
            f"| {row['setting']} | {row['room']} | {_gb(row['limit_bytes'])} | {' or '.join(row['choices'])} | "
            f"{row['predicted_s'] * 1e3:.1f} | {row['auto_s'] * 1e3:.1f} | {_gb(row['reserved'])} | {row['best']} "
            f"{row['best_s'] * 1e3:.1f} | {row['of_best']:.3f} {_span(row['of_best_rounds'])} | {zero3} |"
        )
    good = [row for row in found if "error" not in row]
    if good:
        lines += [
            "",
            f"auto / best over {len(good)} rooms: median {statistics.median(row['of_best'] for row in good):.3f}, "
            f"worst {max(row['of_best'] for row in good):.3f}.",
        ]
    lines += ["", *_presets(document)]
    return "\n".join(lines) + "\n"


def _presets(document: Answer) -> list[str]:
    lines = [
        "Every preset, with all memory there is:",
        "",
        "| setting | preset | predicted | measured | least-most | allocated | reserved |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in document["settings"]:
        for preset in setting["presets"]:
            row = f"| {setting['name']} | {preset['preset']} | {preset['predicted_s'] * 1e3:.1f} "
            if not is_ok(preset):
                error = next(seen["error"] for seen in preset["rounds"] if seen["status"] != "ok")
                lines.append(f"{row}| {error.partition('.')[0]} | | | |")
                continue
            steps = [each * 1e3 for seen in preset["rounds"] for each in seen["steps_s"]]
            sizes = " | ".join(_gb(peak(preset, kind)) for kind in ("allocated", "reserved"))
            lines.append(f"{row}| {step_s(preset) * 1e3:.1f} | {min(steps):.1f}-{max(steps):.1f} | {sizes} |")
    return lines


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes else ""


def _span(values: Sequence[float]) -> str:
    return f"({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    first, *others = (json.loads(Path(file).read_text()) for file in sys.argv[1:])
    for other in others:
        first["settings"] += other["settings"]
        first["command"] += f"\n    {other['command']}"
    print(table(first), end="")
