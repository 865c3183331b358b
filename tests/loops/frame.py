"""Run a scenario under a strategy on real ranks and in one process, and say how it came out.

equal    losses, values and whole weights are those of one process, on every rank
refused  every rank ended in a `ShardwiseError` of one sentence, or in the user's own error, in bounded time
obscure  some rank ended in another exception
wrong    something differs, or some ranks were refused and others went on
hang     some rank was still running at the deadline
abort    some rank's process died

Scenarios are module-level functions under `@scenario`. A rank that hung or died costs its world, and a world in which
a scenario did not come out equal must still train a plain model before it is used again, so that no scenario makes
the following ones fail. A rank that raised ends soon unless there is a next scenario, because a script would have ended
there too: the ranks that wait for it must not depend on its process.
"""

import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.layout import Strategy
from tests.harness import Ending, Pool, World
from tests.loops.loop import Loop, Record, UserError

DEADLINE_S = 20.0
HEALTH_DEADLINE_S = 10.0
LAST_BREATH_S = 1.5  # from a rank's exception to the end of its process
WARM_UP_DEADLINE_S = 120.0  # fresh ranks import half of torch in their first loop
TOLERANCE = 1e-5

Kind = Literal["equal", "refused", "obscure", "wrong", "hang", "abort"]
KINDS: tuple[Kind, ...] = ("equal", "refused", "obscure", "wrong", "hang", "abort")


@dataclass(frozen=True)
class Setting:
    """A strategy as scenarios are run under it."""

    strategy: Strategy
    world: int = 2
    node_size: int | None = None


SETTINGS: dict[str, Setting] = {
    "ddp": Setting("ddp"),
    "zero1": Setting("zero1"),
    "zero2": Setting("zero2"),
    "zero3": Setting("zero3"),
    "shard_grad_op": Setting("shard_grad_op"),
    "hsdp": Setting("hsdp", world=4, node_size=2),
    "zero3_offload": Setting("zero3_offload"),
    "mapping": Setting({"layers.0": "ddp", "*": "zero3"}),
}
ALL = tuple(SETTINGS)
WHOLE_PARAMS = ("ddp", "zero1", "zero2")  # every rank has all weights all the time

Play = Callable[[Loop], nn.Module | Iterable[nn.Module] | None]


@dataclass(frozen=True)
class Scenario:
    """A loop, and the strategies under which it must come out equal; elsewhere it may be refused."""

    name: str
    theme: str
    play: Play
    must_equal: frozenset[str]
    tolerance: float
    deadline_s: float


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, equal: Collection[str] = (), tolerance: float = TOLERANCE, deadline_s: float = DEADLINE_S
) -> Callable[[Play], Play]:
    """Register a scenario; `equal` names the strategies under which a refusal is not enough."""

    def register(play: Play) -> Play:
        name, theme = play.__name__, play.__module__.rpartition(".")[2]
        if name in SCENARIOS:
            raise ValueError(f"two scenarios are called {name!r}: {SCENARIOS[name].theme}, {theme}")
        SCENARIOS[name] = Scenario(name, theme, play, frozenset(equal), tolerance, deadline_s)
        return play

    return register


@dataclass(frozen=True)
class Outcome:
    scenario: str
    setting: str
    kind: Kind
    reason: str = ""
    detail: str = ""

    @property
    def passes(self) -> bool:
        allowed = ("equal",) if self.setting in SCENARIOS[self.scenario].must_equal else ("equal", "refused")
        return self.kind in allowed

    def __str__(self) -> str:
        return f"{self.scenario} under {self.setting}: {self.kind}{f': {self.reason}' if self.reason else ''}"


# ---------------------------------------------------------------------------------------------------------
# on a rank


_end: threading.Timer | None = None


@dataclass(frozen=True)
class Raised:
    kind: Literal["ours", "user", "other"]
    error: str
    trace: str


def play_on_rank(name: str, setting: str | None, world: int) -> Record | Raised | None:
    """Run a scenario on this rank, or in one process with the batches of `world` ranks."""
    global _end
    from tests.loops import catalogue  # noqa: F401  registers all scenarios

    if _end is not None:
        _end.cancel()
    rank = torch.distributed.get_rank()
    chosen = SETTINGS[setting] if setting else None
    options = {"node_size": chosen.node_size} if chosen and chosen.node_size else {}
    loop = Loop(chosen.strategy if chosen else None, rank, world, options)
    warnings.simplefilter("ignore")  # users' loops run with warnings
    try:
        if chosen:
            sw.init(hang_timeout_s=3)
        torch.manual_seed(0)
        result = SCENARIOS[name].play(loop)
        loop.finish([] if result is None else [result] if isinstance(result, nn.Module) else result)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is reported
        _end = threading.Timer(LAST_BREATH_S, os._exit, [1])
        _end.daemon = True
        _end.start()
        return raised(error)
    return loop.record


def raised(error: BaseException) -> Raised:
    kind: Literal["ours", "user", "other"] = "other"
    if isinstance(error, sw.ShardwiseError):
        kind = "ours"
    elif isinstance(error, UserError):
        kind = "user"
    trace = "".join(traceback.format_exception(error))
    return Raised(kind, f"{type(error).__name__}: {error}", trace)


# ---------------------------------------------------------------------------------------------------------
# from outside


@dataclass
class Frame:
    """Runs scenarios on a pool of ranks; keeps what one process gave, by world size."""

    pool: Pool
    patience: float = 1.0  # how many times a scenario's deadline to wait

    def __post_init__(self) -> None:
        self.alone: dict[tuple[str, int], Record] = {}
        self.warm: dict[int, World] = {}

    def run(self, name: str, setting: str, sure: bool = False) -> Outcome:
        """Run one scenario. With `sure`, a failure is tried again in a fresh world, which nothing ran in before."""
        outcome = self.try_once(name, setting)
        if sure and not outcome.passes:
            self.warm[SETTINGS[setting].world].close()
            outcome = self.try_once(name, setting)
        return outcome

    def try_once(self, name: str, setting: str) -> Outcome:
        size = SETTINGS[setting].world
        expected = self.reference(name, size)
        chosen = SCENARIOS[name]
        deadline = self.patience * chosen.deadline_s
        endings = self.world(size).endings(play_on_rank, name, setting, size, deadline=deadline)
        kind, reason, detail = judge(endings, expected, chosen.tolerance)
        seconds = [ending.seconds for ending in endings]
        if max(seconds) - min(seconds) > LAST_BREATH_S / 2:  # a rank may have ended, or be about to
            self.warm[size].close()
        elif kind != "equal":
            self.check_health(setting)
        return Outcome(name, setting, kind, reason, detail)

    def reference(self, name: str, world: int) -> Record:
        if (name, world) not in self.alone:
            (ending,) = self.pool.world(1).endings(play_on_rank, name, None, world, deadline=WARM_UP_DEADLINE_S)
            value = ending.value
            if not isinstance(value, Record):
                raise AssertionError(f"{name} fails in one process: {value.trace if value else ending}")
            numbers = [*map(torch.tensor, value.losses), *value.values, *value.weights.values()]
            assert all(bool(number.isfinite().all()) for number in numbers), f"{name} is not finite in one process"
            self.alone[name, world] = value
        return self.alone[name, world]

    def world(self, size: int) -> World:
        """Ranks that have trained a plain model before."""
        world = self.pool.world(size)
        if self.warm.get(size) is not world:
            world.run(play_on_rank, "plain", "ddp", size, deadline=WARM_UP_DEADLINE_S)
            self.warm[size] = world
        return world

    def check_health(self, setting: str) -> None:
        """Close the world unless a plain model still trains in it."""
        size = SETTINGS[setting].world
        world = self.warm[size]
        if world.usable:
            endings = world.endings(play_on_rank, "plain", setting, size, deadline=HEALTH_DEADLINE_S)
            if judge(endings, self.reference("plain", size), TOLERANCE)[0] != "equal":
                world.close()


def judge(endings: list[Ending], expected: Record, tolerance: float) -> tuple[Kind, str, str]:
    """How a scenario came out, why, and all there is to read about it."""
    lost = [ending for ending in endings if ending.lost]
    values = [ending.value for ending in endings if not ending.lost]
    raises = [value for value in values if isinstance(value, Raised)]
    records = [value for value in values if isinstance(value, Record)]
    detail = "\n".join([*(value.trace for value in raises), *(ending.detail for ending in lost)])
    said = f" ({raises[0].error})" if raises else ""
    if died := [ending for ending in lost if ending.kind == "died"]:
        return "abort", f"{died[0]}{said}", detail
    if lost:
        places = "; ".join(f"rank {ending.rank} in {place(ending.detail)}" for ending in lost)
        return "hang", f"{places}{said}", detail
    if failed := [ending for ending in endings if ending.kind == "raised"]:
        return "obscure", failed[0].error, failed[0].detail
    if others := [value for value in raises if value.kind == "other"]:
        return "obscure", first_line(others[0].error), detail
    # A rank whose loop was shorter has ended when the others are told that it is missing.
    is_missed = all(value.error.startswith(sw.WireError.__name__) for value in raises)
    if raises and records and not is_missed:
        ours = [ending.rank for ending in endings if isinstance(ending.value, Raised)]
        return "wrong", f"only ranks {ours} were refused: {first_line(raises[0].error)}", detail
    if raises:
        said_by_us = [value for value in raises if value.kind == "ours"] or raises
        words = said_by_us[0].error
        return ("refused", first_line(words), detail) if is_sentence(words) else ("obscure", words, detail)
    difference = compare(records, expected, tolerance)
    return ("wrong", difference, detail) if difference else ("equal", "", "")


def compare(records: list[Record], expected: Record, tolerance: float) -> str:
    """The first difference, or nothing."""
    for rank, record in enumerate(records):
        if len(record.losses) != len(expected.losses):
            return f"rank {rank} logged {len(record.losses)} losses, one process {len(expected.losses)}"
        if len(record.values) != len(expected.values):
            return f"rank {rank} checked {len(record.values)} values, one process {len(expected.values)}"
    for step, alone in enumerate(expected.losses):
        mean = sum(record.losses[step] for record in records) / len(records)
        if not abs(mean - alone) <= tolerance * max(abs(alone), 1e-2):
            return f"loss {step} is {mean:.7g}, in one process {alone:.7g}"
    for rank, record in enumerate(records):
        for index, (a, b) in enumerate(zip(record.values, expected.values, strict=True)):
            if reason := differ(a, b, tolerance):
                return f"value {index} on rank {rank} {reason}"
        for index, (a, b) in enumerate(zip(record.shared, records[0].shared, strict=True)):
            if reason := differ(a, b, tolerance):
                return f"shared value {index} on rank {rank} {reason} on rank 0"
        if record.weights.keys() != expected.weights.keys():
            return f"rank {rank} has other weights: {sorted(record.weights.keys() ^ expected.weights.keys())}"
        for name, b in expected.weights.items():
            if reason := differ(record.weights[name], b, tolerance):
                return f"weight {name} on rank {rank} {reason}"
    return ""


def differ(a: Tensor, b: Tensor, tolerance: float) -> str:
    if a.shape != b.shape:
        return f"has shape {tuple(a.shape)}, not {tuple(b.shape)}"
    if a.numel() == 0:
        return ""
    exact = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(exact), b.to(exact)
    error = (a - b).abs().max().item()
    limit = tolerance * max(b.abs().max().item(), 1e-2)
    return "" if error <= limit else f"differs by {error:.3g} (largest {b.abs().max().item():.3g})"


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def is_sentence(words: str) -> bool:
    """Whether an error has something to say, in its first line, that is not a whole page."""
    message = first_line(words).partition(": ")[2]
    return 10 < len(message) < 1000


def place(stacks: str) -> str:
    """The innermost line of ours, or of the scenario, in the stacks of a rank that hung."""
    main = stacks.rpartition("Current thread")[2] or stacks
    found = re.search(r'File "[^"]*/((?:src|tests)/[^"]+)", line (\d+) in (\w+)', main)
    return f"{found[1]}:{found[2]} {found[3]}" if found else "an unknown place"


def table(outcomes: Iterable[Outcome]) -> str:
    """Strategy by kind, then every outcome that is not equal, with its reason."""
    found = list(outcomes)
    settings = [setting for setting in SETTINGS if any(o.setting == setting for o in found)]
    lines = ["".join([f"{'strategy':16}", *(f"{kind:>9}" for kind in KINDS), f"{'failing':>9}"])]
    for setting in [*settings, "all"]:
        chosen = [o for o in found if setting in (o.setting, "all")]
        counts = [sum(o.kind == kind for o in chosen) for kind in KINDS]
        failing = sum(not o.passes for o in chosen)
        lines.append("".join([f"{setting:16}", *(f"{count:9}" for count in counts), f"{failing:9}"]))
    for kind in KINDS[1:]:
        reasons: dict[tuple[str, str], list[Any]] = {}
        for o in found:
            if o.kind == kind:
                reasons.setdefault((o.scenario, o.reason), []).append(o)
        if reasons:
            lines.append(f"\n{kind}")
        for (name, reason), chosen in reasons.items():
            mark = "" if all(o.passes for o in chosen) else " [fails]"
            lines.append(f"  {name}{mark} ({', '.join(o.setting for o in chosen)}): {reason}")
    return "\n".join(lines)
