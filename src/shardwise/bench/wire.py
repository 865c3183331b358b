"""What codecs do to training: the same model from the same weights on the same data, under one strategy after another.

The first strategy is exact, and the others are compared with it. Every run is `shardwise train` with the same settings,
in a folder of its own (`wire_run`); the data is made into tokens once. Then the exact run's checkpoint says what codecs
lose of its gradients and weights (`wire_codecs`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigurationError
from ..base.processes import as_child
from ..checkpoint.steps import CHECKPOINTS
from ..core.layout import layout_of
from ..core.wire.codec import parse
from ..trainer.checks import check_all, look_ahead
from ..trainer.offload import is_auto
from ..trainer.run_folder import DATA
from ..trainer.settings import Settings
from .launch import Say
from .names import OURS, strategies_in
from .wire_run import Seen, Strategy, end, last_words, train


@dataclass(frozen=True, slots=True)
class Asked:
    """`settings` are those of every run, but for its strategy and its folder. The first strategy is the exact one."""

    settings: Settings
    strategies: Mapping[str, Strategy]  # by what they are called
    num_ranks: int
    gradient_codecs: tuple[str, ...] = ()
    weight_codecs: tuple[str, ...] = ()

    @property
    def exact(self) -> str:
        return next(iter(self.strategies))

    @property
    def node_size(self) -> int:
        return self.settings.node_size or self.num_ranks

    @property
    def num_steps(self) -> int:
        assert self.settings.max_steps is not None
        return self.settings.max_steps

    def refuse_what_cannot_run(self) -> None:
        if self.num_ranks < 2:
            raise ConfigurationError("nproc_per_node: 1, and between one rank nothing travels; ask for at least 2")
        for codec in (*self.gradient_codecs, *self.weight_codecs):
            if parse(codec).kind == "as_is":
                raise ConfigurationError(f"codec {codec!r} loses nothing, so there is nothing to measure; leave it out")
        _require_exact(self.exact, self.strategies[self.exact])
        for strategy in self.strategies.values():
            check_all(replace(self.settings, strategy=strategy), self.num_ranks)


def _require_exact(name: str, strategy: Strategy) -> None:
    if is_auto(strategy):
        raise ConfigurationError(f"--strategies: the others are compared with the first, {name}; name what runs there")
    for row in strategy.values() if isinstance(strategy, dict) else [strategy]:
        if not layout_of(row).is_exact:
            raise ConfigurationError(
                f"--strategies: the others are compared with the first, {name}, but that travels as "
                f"params_as={layout_of(row).params_as!r}, grads_as={layout_of(row).grads_as!r}; put an exact one first"
            )


def strategies_of(text: str) -> dict[str, Strategy]:
    """By name: presets, with what travels as something else, or mappings of unit patterns to them, as JSON."""
    found: dict[str, Strategy] = {}
    for contender in strategies_in(text):
        name = contender.removeprefix(f"{OURS}:")
        if "@" in name:
            raise ConfigurationError(f"--strategies: {name!r} asks for a way to run, which `shardwise train` has not")
        rows = json.loads(name) if name.startswith("{") else name
        if isinstance(rows, dict) and not all(isinstance(row, str) for row in rows.values()):
            raise ConfigurationError(
                f"--strategies: {name!r} holds a row written out; name it, as in zero3+grads_as=int8"
            )
        found[name] = rows
    if not found:
        raise ConfigurationError("--strategies: nothing to train; name at least one")
    return found


def codecs_of(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        parse(name)
    return names


@dataclass(slots=True)
class Findings:
    asked: Asked
    runs: dict[str, Seen] = field(default_factory=dict)
    codecs: dict[str, Any] = field(default_factory=dict)  # as `wire_codecs.measure` tells them
    codecs_error: str = ""

    @property
    def num_left(self) -> int:
        return len(self.asked.strategies) - len(self.runs)

    @property
    def wants_codecs(self) -> bool:
        return bool(self.asked.gradient_codecs or self.asked.weight_codecs)


def prepare(asked: Asked, folder: Path, say: Say) -> None:
    """Make the data into tokens, where all runs find it, and refuse what can be refused of it."""
    look_ahead(replace(asked.settings, output_dir=str(folder)), asked.num_ranks, say)


def run(asked: Asked, folder: Path, say: Say) -> Iterator[Findings]:
    """What is known so far, again after every run. Run folders are made in `folder`, where the data is prepared."""
    findings = Findings(asked)
    data = folder / DATA
    for index, (name, strategy) in enumerate(asked.strategies.items(), 1):
        say(f"{name} ({index} of {len(asked.strategies)})")
        place = folder / f"{index:02}-{_file_name(name)}"
        place.mkdir()
        (place / DATA).symlink_to(data.resolve())
        settings = replace(asked.settings, strategy=strategy)
        seen = findings.runs[name] = train(settings, name, place, asked.num_ranks, say)
        say(f"  {_in_words(seen)}")
        yield findings
        if name == asked.exact and seen.status == "ok" and findings.wants_codecs:
            say("what codecs lose of its gradients and weights")
            findings.codecs, findings.codecs_error = _codecs(asked, place)
            yield findings
        # Of every run its figures are kept: a checkpoint is three times as large as the model.
        shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)


def _in_words(seen: Seen) -> str:
    if seen.status != "ok" or not seen.losses:
        return f"{seen.status}: {seen.error}"
    *_, last = seen.losses.values()
    return f"loss {last:.4f}" + (f", {seen.step_s:.3f} s per step" if seen.step_s else "")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")[:60]


def _codecs(asked: Asked, run_folder: Path) -> tuple[dict[str, Any], str]:
    answer, log = run_folder.with_suffix(".codecs.json"), run_folder.with_suffix(".codecs.log")
    question = {
        "run": str(run_folder),
        "num_ranks": asked.num_ranks,
        "step": asked.num_steps,
        "gradients": asked.gradient_codecs,
        "weights": asked.weight_codecs,
    }
    # As many threads as a rank of the runs has.
    num_threads = max(1, len(os.sched_getaffinity(0)) // asked.num_ranks)
    environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ}
    if asked.settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w") as sink:
        command = [sys.executable, "-m", "shardwise.bench.wire_codecs", json.dumps(question), str(answer)]
        worker = subprocess.Popen(command, env=as_child(environment), stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = worker.wait()
        finally:
            end(worker)
    if code or not answer.exists():
        return {}, last_words(log.read_text(errors="replace"), code)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found, ""
