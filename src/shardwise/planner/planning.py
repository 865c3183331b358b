"""`sw.plan`: predicts memory and step time of every strategy for a model on a cluster, and recommends one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Union

from ..base.errors import ConfigurationError, did_you_mean
from ..base.text import seconds
from ..core.layout import MOST_SPLIT, PRESETS, Layout, Strategy
from .assess import Assessment, Assessor, Machine, Subject
from .changes import Alternative, Question, alternatives, nearest_change, room_words
from .hardware.cluster import Cluster, make_cluster
from .hardware.gpus import REAL, efficiency_of
from .search import (
    MODES,
    TIE,
    Choice,
    assess_named,
    changed_presets,
    changes_after_auto,
    fastest,
    mixtures,
    offloads,
    presets,
    tried_layouts,
)
from .shapes.names import is_file
from .shapes.shape import ModelShape, StatesOnly
from .states import STATE_FIELDS, States, states_of
from .subject import Built, Planned, model_of, subject_for
from .training import OURS, USUAL_SEQ, Checkpointing, Lora, Training, check_speculation

if TYPE_CHECKING:
    from torch import nn

Model = Union[ModelShape, StatesOnly, Built, "nn.Module"]
OPEN = "auto"  # the plan chooses the checkpointing


@dataclass(frozen=True, repr=False)
class Plan:
    """All assessed strategies (`found`, presets first). `recommended`: None if no exact or requested one fits. `ours`:
    if another engine is planned, the same strategy and training under ours; if none fits, of that which needs least."""

    subject: Subject
    machine: Machine
    training: Training
    found: tuple[Assessment, ...]
    recommended: Assessment | None
    assess: Assessor = field(repr=False)
    choice: Choice = field(repr=False)
    ours: Assessment | None = None
    moves: Sequence[str] = ()  # the changes that follow `auto+`
    reason: str = ""  # instead of the planner's own
    question: Question | None = field(default=None, repr=False)  # None: changes of the training are not tried

    @property
    def facts(self) -> Mapping[str, object]:
        return self.subject.facts

    @cached_property
    def why(self) -> str:
        if self.reason:
            return self.reason
        best, ours, words = self.recommended, self.ours, []
        if self.moves and best:
            words.append(f"the fastest that fits with {', '.join(self.moves)}, {best.step_s:.3g} s a step")
        else:
            words.append(_why(self.assess, self.found, best))
        if best:
            words.append(f"{'tight: ' if best.is_tight else ''}{room_words(best)}")
        if ours:
            speed = f" and {ours.tokens_per_s / self.shown.tokens_per_s:.2f}x the speed" if ours.fits else ""
            words.append(f"the same under {OURS}: {ours.needed_bytes / 1e9:,.1f} GB{speed or ', which does not fit'}")
        return "; ".join(filter(None, [*words, str(self.facts.get("note", ""))]))

    @property
    def shown(self) -> Assessment:
        """The recommended strategy; if none is, the one that needs least."""
        return self.recommended or min(self.found, key=lambda entry: entry.needed_bytes)

    @cached_property
    def refusals(self) -> dict[str, str]:
        """The strategies that do not fit, by name, with a change that makes each of them fit; empty if none does."""
        return {entry.name: nearest_change(self.assess, entry) for entry in self.found if not entry.fits}

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The best changes of the training, those that cost least in exactness first."""
        return () if self.question is None else alternatives(self.question, self.found, self.recommended)

    def __repr__(self) -> str:
        return f"<Plan of {self.subject.name} on {self.machine.cluster}: {self.recommended!r} of {len(self.found)}>"

    def __str__(self) -> str:
        lines = [f"{self.subject.name} on {self.machine.cluster}: {self.why}"]
        for entry in self.found:
            need = f"{entry.needed_bytes / 1e9:,.1f} GB"
            off_device = {"host": entry.host_bytes, "disk": entry.disk_bytes}
            need += "".join(f", {size / 1e9:,.1f} on the {place}" for place, size in off_device.items() if size)
            need += f" ({entry.spare_bytes / 1e9:,.1f} GB of it spare)" if entry.spare_bytes else ""
            step = f"{entry.step_s:.3f} s" + (f" ({entry.unclipped_s:.3f} s unclipped)" if entry.unclipped_s else "")
            lines.append(f"  {entry.name}: " + (f"{need}, {step}" if entry.fits else entry.why_not))
        lines += [f"  or {tried!r}" for tried in self.alternatives]
        return "\n".join(lines)


def plan(
    model: Planned,
    cluster: str | Cluster | Machine,
    training: Training | None = None,
    *,
    strategy: Strategy | None = None,
    checkpointing: str | None = None,
    global_batch: int | None = None,
    search: bool = True,
    **sizes: Any,
) -> "Plan | States":
    """Predict memory and step time of every strategy for a model on a cluster, and recommend one.

    model: a name ("llama-3-8b"), a config.json (path, folder or contents), a shape, or a module (on the meta device).
        A config of an unknown family is planned as the module that transformers builds from it.
    cluster: "8xH100-80GB", or a value of `make_cluster`, which takes nodes and networks.
    training: settings of a step; or pass its fields as keywords: seq=4096, micro_batch=2, optimizer="adamw8bit".
    strategy: assess only this one. "auto+params_as=int8" assesses every preset with parameters sent as int8.
    checkpointing: "auto" checkpoints no more than is needed to fit; it is the default if `training` is not given.
        A module keeps the checkpointing that it has.
    global_batch: sequences per step over all GPUs; each strategy gets the micro-batch that suits it best, unless one is
        given.
    search: also try mixed layouts, and an optimizer that is split between device and host.
    """
    if checkpointing not in (None, OPEN, *MODES):
        raise ConfigurationError(f"checkpointing {checkpointing!r}; {did_you_mean(str(checkpointing), [*MODES, OPEN])}")
    if checkpointing is None and training is None:
        checkpointing = OPEN
    elif checkpointing not in (None, OPEN):
        sizes["checkpointing"] = checkpointing
    found = model_of(model)
    if training is None and isinstance(found, (ModelShape, Built)) and 0 < found.num_positions < USUAL_SEQ:
        sizes = {"seq": found.num_positions, **sizes}
    known = [entry.name for entry in fields(Training)]
    for name in sizes:
        if name not in known:
            raise ConfigurationError(
                f"sw.plan: there is no {name!r}; {did_you_mean(name, known)}; nodes and networks go into "
                "sw.make_cluster(...)"
            )
    if isinstance(sizes.get("lora"), int):
        sizes["lora"] = Lora(sizes["lora"])
    has_micro_batch = training is not None or "micro_batch" in sizes
    training = replace(training, **sizes) if training is not None else Training(**sizes)
    machine, is_named = machine_of(cluster), isinstance(model, str) and not is_file(model)
    subject = _subject(found, is_named, training)
    if isinstance(subject, StatesOnly):
        unused = [] if global_batch is None else ["global_batch"]
        base = Training(seq=training.seq) if isinstance(found, Built) else Training()
        unused += [key for key in known if key not in STATE_FIELDS and getattr(training, key) != getattr(base, key)]
        if unused:
            raise ConfigurationError(
                f"{subject.name}: {', '.join(unused)} need a real shape; of the states alone precision, optimizer, "
                "accumulation and strategy are planned; leave the others out"
            )
        return states_of(subject, machine, training, strategy)
    assess = Assessor(subject, machine)
    check_speculation(training.speculation, tried_layouts(strategy, assess.unit_names), machine.shares)
    modes: tuple[Checkpointing, ...] = (training.checkpointing,)
    if checkpointing == OPEN and isinstance(found, (ModelShape, Built)):
        modes = MODES if isinstance(found, ModelShape) else ("none", "full")
    question = Question(
        subject_for=partial(_subject, found, is_named),
        has_shape=isinstance(found, ModelShape),
        assess=assess,
        training=training,
        modes=modes,
        strategy=strategy,
        global_batch=global_batch,
        has_micro_batch=has_micro_batch,
        answer=partial(_answer, search),
    )
    made = _answer(search, question)
    return replace(made, question=question) if training.engine == OURS else made


def _subject(model: "Model", is_named: bool, training: Training) -> Subject | StatesOnly:
    if isinstance(model, ModelShape) and is_named and training.lora is not None:
        # A model known by name has no files: its frozen weights are assumed to be in the compute dtype.
        model = replace(model, dtype=training.formats.compute)
    return subject_for(model, training)


def _answer(search: bool, question: Question) -> Plan:
    training, strategy = question.training, question.strategy
    return plan_for(question.assess, training, question.choice, strategy=strategy, search=search, has_disk=True)


def plan_for(
    assess: Assessor,
    training: Training,
    choice: Choice,
    *,
    strategy: Strategy | None = None,
    search: bool = True,
    only_exact: bool = False,
    has_disk: bool = False,
    tie: float = TIE,
) -> Plan:
    """Assess strategies and recommend one. A strategy with quantised collectives is not exact: it is recommended only
    if `strategy` names it, and with `only_exact` it is not assessed. `has_disk`: there is a folder for state on disk.
    `tie`: a plan whose speed differs from the fastest by at most this fraction counts as equally fast."""
    moves = changes_after_auto(strategy)
    if moves:
        entries = candidates = [assess_named(assess, layout.name, choice) for layout in changed_presets(moves)]
    elif strategy is not None and moves is None:
        entries = candidates = [assess_named(assess, strategy, choice)]
    else:
        entries = list(presets(assess, choice, only_exact, has_disk))
        candidates = [entry for entry in entries if entry.is_exact]
        if search and training.engine == "shardwise":
            more = list(mixtures(assess, {entry.name: entry for entry in candidates}, choice))
            more += offloads(assess, [*candidates, *more], choice, has_disk)
            entries, candidates = [*entries, *more], [*candidates, *more]
    best = fastest(candidates, tie)
    made = Plan(
        assess.subject, assess.machine, training, tuple(entries), best, assess, choice, moves=tuple(moves or ())
    )
    if training.engine == OURS:
        return made
    shown = made.shown
    # With sums in the same dtype.
    same = replace(shown.training, engine=OURS, precision=shown.training.formats, reduce=None)
    return replace(made, ours=assess(shown.name, shown.layouts, same))


def machine_of(cluster: str | Cluster | Machine) -> Machine:
    if isinstance(cluster, Machine):
        return cluster
    if not isinstance(cluster, (str, Cluster)):
        raise ConfigurationError(f"sw.plan: the cluster is {cluster!r}; give '8xH100-80GB', or sw.make_cluster(...)")
    made = make_cluster(cluster) if isinstance(cluster, str) else cluster
    return Machine(made, efficiency_of(made.gpu.name), REAL)


def _why(assess: Assessor, entries: Sequence[Assessment], best: Assessment | None) -> str:
    if best is None:
        # Take the strategy that needs the least memory, and name a change with which it fits.
        exact = [entry for entry in entries if entry.is_exact] or list(entries)
        least = min(exact, key=lambda entry: entry.needed_bytes)
        change = nearest_change(assess, least)
        advice = f"{least.name} {least.why_not}" + (f"; it would fit with {change}" if change else "")
        if not (inexact := [entry.name for entry in entries if entry.fits]):
            return f"nothing fits: {advice}"
        return f"nothing exact fits: {advice}. {' and '.join(inexact)} would fit, and rounds what is sent: ask for it"
    if not best.is_on_device:
        return _why_off_device(entries, best)
    if len(entries) == 1:  # nothing was compared
        return f"it fits, {seconds(best.step_s)} a step"
    others = [entry for entry in entries if entry.fits and entry is not best]
    if assess.machine.cluster.world_size == 1 and set(best.layouts) == {Layout()}:
        return f"it fits on one GPU, and there is no other rank to share with, {seconds(best.step_s)} a step"
    faster = [entry for entry in others if entry.tokens_per_s > best.tokens_per_s * (1 + TIE)]
    needs_more = any(entry.is_exact and entry.is_on_device for entry in faster)
    text = "the fastest that fits" + (" with room" if needs_more else "")
    text += " without the host" if any(entry.is_exact and not entry.is_on_device for entry in faster) else ""
    text += " and is exact" if any(not entry.is_exact for entry in faster) else ""
    text += f", {seconds(best.step_s)} a step"
    for entry in others:
        if entry.tokens_per_s * 1.05 < best.tokens_per_s and set(entry.layouts) == {PRESETS[MOST_SPLIT]}:
            text += f", {best.tokens_per_s / entry.tokens_per_s:.2f}x as fast as {entry.name}"
    return text


def _why_off_device(entries: Sequence[Assessment], best: Assessment) -> str:
    """Say why state is offloaded, and how much of host and disk it takes."""
    here = [entry for entry in entries if entry.fits and entry.is_on_device and entry.is_exact]
    if len(entries) == 1:
        text = "it fits"
    elif not here:
        text = "nothing fits on the device alone; the fastest that fits"
    else:
        is_faster = all(entry.tokens_per_s < best.tokens_per_s for entry in here)
        text = "the fastest that fits" if is_faster else "the fastest that fits with room"
    text += f", {seconds(best.step_s)} a step; "
    cluster, held = best.machine.cluster, []
    if best.host_bytes:
        held.append(f"the host of each node holds {best.host_bytes / 1e9:,.1f} of {cluster.host_bytes / 1e9:,.1f} GB")
    if best.disk_bytes:
        held.append(f"{'its' if held else 'the'} disk {best.disk_bytes / 1e9:,.1f} GB, in a folder to name (disk_path)")
    return text + ", ".join(held)
