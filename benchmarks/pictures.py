"""Draw the pictures of README and docs: memory by strategy from a real plan, a unit's life over the lanes, the rings.

python -m benchmarks.pictures
"""

import json
import subprocess
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
FONT = 'font-family="system-ui, sans-serif" font-size="13"'
COLORS = {
    "parameters": "#3b6fb6",
    "gradients": "#e0853b",
    "optimizer": "#4f9a63",
    "activations": "#8a6bb1",
    "buffers": "#9aa3ad",
}
PLANNED = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "zero2_offload", "zero3_offload")


def text(x: float, y: float, words: str, anchor: str = "start", fill: str = "#1d2733") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}" {FONT}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'


def svg(width: int, height: int, label: str, parts: list[str]) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    head = f'<svg {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([head, box(0, 0, width, height, "#ffffff"), *parts, "</svg>"]) + "\n"


def memory_by_strategy() -> str:
    """Stacked bars: what one GPU holds at its peak under each preset."""
    command = [sys.executable, "-m", "shardwise", "plan", "llama-3-8b", "--gpus", "8xH100", "--seq", "2048", "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    found = {entry["name"]: entry for entry in plan["strategies"]}
    capacity = plan["cluster"]["gpu"]["memory_bytes"]
    scale, left, row = 560 / 155e9, 130, 30
    parts = [
        text(10, 22, "Peak memory of one GPU: Llama-3 8B, 8 x H100-80GB, bf16 with fp32 masters, AdamW, 2048 tokens")
    ]
    for number, (name, color) in enumerate(COLORS.items()):
        parts += [box(left + 118 * number, 34, 12, 12, color), text(left + 118 * number + 17, 45, name)]
    for number, name in enumerate(PLANNED):
        entry, y, x = found[name], 60 + row * number, float(left)
        held = entry["peak"]["bytes"]
        sizes = {
            "parameters": held["params"],
            "gradients": held["grads"],
            "optimizer": held["optimizer"],
            "activations": held["activations"] + held["loss"],
            "buffers": held["gathered"] + held["reduce"],
        }
        parts.append(text(left - 8, y + 15, name, "end"))
        for kind, num_bytes in sizes.items():
            parts.append(box(x, y, num_bytes * scale, 20, COLORS[kind], f"{kind} {num_bytes / 1e9:.1f} GB"))
            x += num_bytes * scale
        note = "" if entry["fits"] else ", does not fit"
        parts.append(text(x + 6, y + 15, f"{entry['per_gpu_bytes']['peak_active'] / 1e9:.1f} GB{note}"))
    bottom, limit = 60 + row * len(PLANNED), left + capacity * scale
    parts.append(
        f'<line x1="{limit:.1f}" y1="54" x2="{limit:.1f}" y2="{bottom}" stroke="#b3261e" stroke-dasharray="4 3"/>'
    )
    parts.append(text(limit, bottom + 14, f"memory of the GPU, {capacity / 1e9:.1f} GB", "middle", "#b3261e"))
    return svg(860, bottom + 24, "Peak memory of one GPU by strategy", parts)


# Lane, begin, end, label, whether it is unit 1's. Two slots: unit 3 takes that of unit 1; 2 and 3 stay in theirs
# for the backward.
STEP = [
    ("gather", 0, 1, "0", False), ("gather", 1, 2, "1", True), ("compute", 1, 2, "fwd 0", False),
    ("gather", 2, 3, "2", False), ("compute", 2, 3, "fwd 1", True), ("gather", 3, 4, "3", False),
    ("compute", 3, 4, "fwd 2", False), ("compute", 4, 5, "fwd 3", False), ("compute", 5, 6.5, "bwd 3", False),
    ("compute", 6.5, 8, "bwd 2", False), ("gather", 6.5, 7.5, "1", True), ("reduce", 6.5, 7.8, "3", False),
    ("compute", 8, 9.5, "bwd 1", True), ("gather", 8, 9, "0", False), ("reduce", 8, 9.3, "2", False),
    ("compute", 9.5, 11, "bwd 0", False), ("reduce", 9.5, 10.8, "1", True), ("reduce", 11, 12.3, "0", False),
    ("compute", 12.3, 14, "update all", True),
]  # fmt: skip
STATES = [
    (0, 1, "sharded"), (1, 2, "gathering"), (2, 3, "gathered"), (3, 6.5, "sharded: its slot is unit 3's"),
    (6.5, 7.5, "gathering"), (7.5, 9.5, "gathered"), (9.5, 10.8, "reducing"), (10.8, 14, "sharded, gradient final"),
]  # fmt: skip


def life_of_a_unit() -> str:
    """Four units under zero3 over the lanes of one step; unit 1 in colour, with its states below."""
    left, scale = 80, 60
    lanes = {"gather": 40, "compute": 76, "reduce": 112}
    parts = [text(10, 22, "One step under zero3: four units, two gather slots. Blue: unit 1; its state is below.")]
    parts += [text(left - 10, y + 18, lane, "end") for lane, y in lanes.items()]
    for lane, begin, end, label, is_ours in STEP:
        x, width = left + begin * scale, (end - begin) * scale - 3
        parts.append(box(x, lanes[lane], width, 26, "#3b6fb6" if is_ours else "#d5dbe2"))
        parts.append(text(x + width / 2, lanes[lane] + 18, label, "middle", "#ffffff" if is_ours else "#1d2733"))
    parts.append(text(left - 10, 176, "unit 1", "end"))
    for begin, end, state in STATES:
        x, width = left + begin * scale, (end - begin) * scale - 3
        parts.append(box(x, 158, width, 26, "#dfeedd" if "sharded" in state else "#cfe0f5"))
        parts.append(text(x + width / 2, 176, state, "middle"))
    return svg(930, 196, "The life of a unit over the lanes of a step", parts)


RINGS = [
    ("cli",),
    ("bench",),
    ("migrate", "integrations", "doctor", "report"),
    ("trainer",),
    ("api: sw.shard, sw.describe",),
    ("checkpoint", "planner"),
    ("core: the engine",),
    ("base",),
]


def rings() -> str:
    """The packages, outer ones above; each imports from boxes below it only."""
    parts = [text(10, 22, "A package imports only from packages below it.")]
    for number, names in enumerate(RINGS):
        y, width = 36 + 44 * number, 620 / len(names)
        fill = "#cfe0f5" if "core" in names[0] else "#e8ecf1"
        for place, name in enumerate(names):
            parts.append(box(20 + width * place, y, width - 6, 36, fill))
            parts.append(text(20 + width * place + width / 2, y + 23, name, "middle"))
    return svg(660, 36 + 44 * len(RINGS) + 6, "The packages as rings", parts)


def main() -> None:
    for name, picture in (("memory", memory_by_strategy()), ("unit-life", life_of_a_unit()), ("rings", rings())):
        (DOCS / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
