"""Running every contender in every setting, and comparing losses before anything else.

Repetitions are interleaved (A B C A B C ...), so that a slow minute of the machine affects all contenders. A contender
that failed in a setting does not run there again. A contender with wrong losses gets an error instead of ratios.
benchmarks/README.md says with which losses they are compared.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from ..base.errors import ConfigurationError
from ..core.layout import layouts_for
from ..core.schedule.units import find_units
from .case import FLOORS, Case, Shape, label, needs_disk, one_process, read_strategy
from .launch import Calls, Launch, Outcome, Say
from .model import build

# Relative differences of losses. Rounding to bf16 changes a number by up to 4e-3; pure-bf16 also rounds weights.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "pure-bf16": 5e-2}
SHALLOW, DEEP = 4, 8  # blocks; the difference of both counts gives the calls per unit


@dataclass(frozen=True, slots=True)
class Session:
    """The request: settings, contenders and options."""

    settings: Sequence[Case]  # without contenders
    strategies: Sequence[str]
    peers: Sequence[str]
    repetitions: int = 1
    count_calls: bool = False
    with_floors: bool = True
    with_reference: bool = True  # run one process for reference losses

    @property
    def cases(self) -> list[Case]:
        """Return all runs of one repetition. Floors depend on the shape alone, so they run once per shape."""
        found: list[Case] = []
        for setting in self.settings:
            is_first = all(case.shape != setting.shape for case in found)
            floors = FLOORS if self.with_floors and setting.fabric and is_first else ()
            found += [replace(setting, contender=name) for name in (*floors, *self.peers, *self.strategies)]
        return found

    def check(self) -> None:
        """Raise ConfigurationError for a request that cannot run, before anything is started."""
        if not self.strategies and not self.peers:
            raise ConfigurationError("nothing to measure: --strategies and --peers are both empty")
        for contender in (*self.peers, *self.strategies):
            if needs_disk(contender) and not self.settings[0].disk_path:
                raise ConfigurationError(f"{label(contender)} offloads to disk: name a folder with --disk-path")
        for shape in dict.fromkeys(setting.shape for setting in self.settings):
            model = build(shape, torch.device("meta"), 0)
            units = [unit.name for unit in find_units(model, "auto")]
            for contender in self.strategies:
                strategy, _ = read_strategy(contender.partition(":")[2])
                if not isinstance(strategy, str):
                    layouts_for(strategy, units)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing losses. `status` is ok, differs, refused, missing, oom or failed."""

    status: str
    error: str
    compared_with: str = ""
    loss_difference: float | None = None


@dataclass(frozen=True, slots=True)
class AddedCalls:
    """Python calls that sharding adds to a step: per unit (in total and by function), and once per step."""

    by_function: Calls
    per_unit: float
    besides: float


@dataclass(frozen=True, slots=True)
class Findings:
    """The results so far; `num_left` runs are still to come."""

    session: Session
    outcomes: dict[Case, list[Outcome]]  # by repetition
    verdicts: dict[Case, Verdict]
    num_left: int = 0
    calls: dict[Case, AddedCalls] = field(default_factory=dict)


def run(session: Session, launch: Launch, say: Say) -> Iterator[Findings]:
    """Run everything, and yield the findings after each run, so that an interrupted session keeps its results."""
    cases = session.cases
    alone = dict.fromkeys(one_process(setting) for setting in session.settings if not setting.fabric)
    references = {case: launch(case) for case in alone} if session.with_reference else {}
    for case, outcome in references.items():
        say(f"one process, {case.shape.name}: {outcome.error or 'reference losses are known'}")
    outcomes: dict[Case, list[Outcome]] = {case: [] for case in cases}
    num_left = num_runs = session.repetitions * len(cases)
    for _ in range(session.repetitions):
        for case in cases:
            num_left -= 1
            if all(earlier.status == "ok" for earlier in outcomes[case]):
                outcome = launch(case)
                outcomes[case].append(outcome)
                result = f"{outcome.status}: {outcome.error}"
                if outcome.status == "ok":
                    first = outcome.answers[0]
                    result = f"{statistics.median(first['seconds']):.4f} s per step, set up in {first['setup_s']:.0f} s"
                say(f"[{num_runs - num_left}/{num_runs}] {case}: {result}")
                so_far = {case: found for case, found in outcomes.items() if found}
                yield Findings(session, so_far, _verdicts(so_far, references), num_left)
    calls = added_calls(cases, launch, say) if session.count_calls else {}
    yield Findings(session, outcomes, _verdicts(outcomes, references), 0, calls)


def losses_of(outcome: Outcome) -> list[float]:
    """The mean loss over the ranks, by step."""
    by_rank = [answer["losses"] for answer in outcome.answers]
    return [statistics.fmean(losses) for losses in zip(*by_rank, strict=True)]


def _verdicts(outcomes: dict[Case, list[Outcome]], references: dict[Case, Outcome]) -> dict[Case, Verdict]:
    """Compare each case with one process; without one, with the first contender that trained the same shape."""
    verdicts = {}
    for case, found in outcomes.items():
        known = [("one process", outcome) for outcome in [references.get(one_process(case))] if outcome]
        known += [
            (label(other.contender), runs[0]) for other, runs in outcomes.items() if runs and other.shape == case.shape
        ]
        whose, reference = next(
            ((name, outcome) for name, outcome in known if outcome.status == "ok"), ("nobody", Outcome())
        )
        verdicts[case] = judge(case, found, losses_of(reference), whose)
    return verdicts


def judge(case: Case, outcomes: Sequence[Outcome], expected: Sequence[float], whose: str) -> Verdict:
    for outcome in outcomes:
        if outcome.status != "ok":
            return Verdict(outcome.status, outcome.error)
    allowed = 2e-2 + case.tokens_per_step**-0.5 if case.fabric else TOLERANCES[case.precision]
    largest = 0.0
    for outcome in outcomes:
        pairs = list(zip(losses_of(outcome), expected, strict=True))
        for step, (measured, want) in enumerate(pairs[:1] if case.fabric else pairs):
            apart = abs(measured - want) / abs(want)
            largest = max(largest, apart)
            if not apart <= allowed:  # also true for NaN
                losses = f"the loss of step {step} is {measured:.6g}, that of {whose} {want:.6g}"
                return Verdict("differs", f"{losses}: {apart:.1e} apart, {allowed:.0e} allowed", whose, apart)
    return Verdict("ok", "", whose, largest)


def added_calls(cases: Sequence[Case], launch: Launch, say: Say) -> dict[Case, AddedCalls]:
    """Count the Python calls of one step after a few warm-up steps, minus those of the plain model with its optimizer.

    They are counted once per contender and shape, because links and dtypes do not change them. The functions of the
    emulated fabric do not count: with real links none of them runs.
    """
    launch = cache(launch)  # the plain model is needed more than once
    by_name: dict[tuple[str, Shape], AddedCalls | None] = {}
    for case in cases:
        if case.contender not in FLOORS and not by_name.get((case.contender, case.shape)):
            by_name[case.contender, case.shape] = _added(case, launch, say)
    found = {case: by_name.get((case.contender, case.shape)) for case in cases}
    return {case: added for case, added in found.items() if added is not None}


def _added(case: Case, launch: Launch, say: Say) -> AddedCalls | None:
    counted = []
    for num_blocks in (SHALLOW, DEEP):
        sized = replace(case, shape=replace(case.shape, layers=num_blocks), count_calls=True, trace="")
        outcomes = [launch(sized), launch(replace(sized, contender="plain"))]
        if any(outcome.status != "ok" for outcome in outcomes):
            say(f"Python calls of {case}: {' '.join(outcome.error for outcome in outcomes)}")
            return None
        counted.append(_subtract(*(outcome.answers[0]["calls"] for outcome in outcomes)))
    shallow, deep = counted
    by_function = {name: times / (DEEP - SHALLOW) for name, times in _subtract(deep, shallow).items()}
    per_unit = sum(by_function.values())
    say(f"Python calls of {case}: {per_unit:.0f} per unit and step")
    return AddedCalls(by_function, per_unit, sum(shallow.values()) - SHALLOW * per_unit)


def _subtract(calls: Calls, others: Calls) -> Calls:
    names = [name for name in {*calls, *others} if not name.startswith("bench/fabric.py:")]
    return {name: calls.get(name, 0) - others.get(name, 0) for name in names}
