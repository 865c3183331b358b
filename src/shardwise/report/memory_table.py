"""Memory of a rank, planned beside seen, class by class. A CPU's allocator keeps no books: its process stands apart."""

from .plan_facts import Json, amount, mapping, number, rows

PROCESS = "whole process"

SEEN = {
    "params": "memory_params",
    "grads": "memory_peak_grads",
    "optimizer": "memory_optimizer",
    "buffers": "memory_peak_buffers",
    "activations": "memory_peak_activations",
    "peak": "memory_peak",
    "reserved": "memory_reserved",
}


def _planned(strategy: Json) -> dict[str, float | None]:
    """As a row counts: state and buffers at rest, and activations are all that the peak has besides."""
    held, rests = mapping(strategy.get("per_gpu_bytes")), mapping(strategy.get("rests"))
    state = {name: number(rests.get(name, held.get(name))) for name in ("params", "grads", "optimizer")}
    buffers = number(rests.get("buffers", amount(held, "gathered") + amount(held, "reduce"))) if held else None
    resting, peak = {**state, "buffers": buffers}, number(held.get("peak_active"))
    known = [value for value in resting.values() if value is not None]
    return {
        **resting,
        "activations": None if peak is None else max(peak - sum(known), 0),
        "peak": peak,
        "reserved": number(held.get("peak_reserved")),
    }


def memory_beside(steps: list[Json], plan: Json | None) -> list[Json]:
    expected = _planned(rows(plan.get("strategies"))[0] if plan else {})
    on_gpu = any(number(row.get("memory_reserved")) is not None for row in steps)
    found = []
    for name, key in SEEN.items():
        seen = max((value for row in steps if (value := number(row.get(key))) is not None), default=None)
        planned = expected[name]
        if seen is not None or (planned is not None and name != "reserved"):
            found.append({"class": name, "planned_bytes": planned, "seen_bytes": seen})
    if steps and not on_gpu:
        # There the peak is of all that the process holds, Python and the data too: nothing that was planned.
        peak = next((row for row in found if row["class"] == "peak"), {})
        if number(peak.get("seen_bytes")) is not None:
            found.append({"class": PROCESS, "planned_bytes": None, "seen_bytes": peak["seen_bytes"]})
            peak["seen_bytes"] = None
        found = [row for row in found if row["planned_bytes"] is not None or row["seen_bytes"] is not None]
    return found
