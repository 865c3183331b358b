"""`--offload` and `--wire`: state that is offloaded to host memory or disk, and the formats in which it is sent.

    optimizer=host        all optimizer state in host memory; optimizer=host:0.6: 60 % of it, the rest on the device
    params=disk:/nvme     on disk, in this folder
    disk:/nvme            only the folder: for a strategy that puts state on disk; it also allows `auto` to use a disk

    params=int8           for --wire: the codec in which parameters are sent
    params=int8:forward   only in the forward; the backward uses exact parameters
    grads=int4:feedback   each encoding error is added to the next gradient

Both can be appended to the name of a preset (zero3+optimizer=host). The result is the name of a strategy, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..base.errors import ConfigurationError, did_you_mean
from ..core.layout import AUTO, ENCODABLE, MOST_SPLIT, Layout, layout_of
from .settings import Settings

Named = str | dict[str, str]
_PART = re.compile(r"[\d.]+(e-?\d+)?")


@dataclass(frozen=True, slots=True)
class Offload:
    """Changes of a layout (`moves`, in the syntax of `layout.changed`, codecs included), and the folder on disk."""

    moves: tuple[str, ...]
    folder: Path | None

    def applied_to(self, strategy: Named) -> Named:
        """Append the moves to the strategy's name, or to each name. `layout_of` refuses two moves of the same state."""
        if isinstance(strategy, dict):
            return {pattern: "+".join([name, *self.moves]) for pattern, name in strategy.items()}
        return "+".join([strategy, *self.moves])

    def require_folder(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigurationError(f"offload: {self.folder} is not a folder: make it, or name one that is there")


def offload_of(words: Sequence[str], wire: Sequence[str] = (), quantize: str | None = None) -> Offload:
    found = [_read(word) for word in words]
    folders = list(dict.fromkeys(folder for _, folder in found if folder))
    if len(folders) > 1:
        raise ConfigurationError(f"offload: folders {folders[0]!r} and {folders[1]!r}: name one, for all state on disk")
    moves = [move for move, _ in found if move]
    for word in wire:
        what, _, codec = word.partition("=")
        if not codec:
            raise ConfigurationError(f"wire {word!r} names no format; write params=int8 or grads=int4:feedback")
        if what not in ENCODABLE:
            raise ConfigurationError(f"wire {word!r}: {what!r} cannot be encoded; {did_you_mean(what, ENCODABLE)}")
        moves.append(f"{what}_as={codec}")
    moves += [] if quantize is None else [f"frozen_as={quantize}"]
    return Offload(tuple(moves), Path(folders[0]).expanduser() if folders else None)


def _read(word: str) -> tuple[str, str]:
    """Return the move and the folder of one value of `--offload`; either may be empty."""
    what, equals, where = word.partition("=")
    place, _, rest = (where if equals else word).partition(":")
    place = place.lower()
    if not equals:
        if place != "disk" or not rest:
            raise ConfigurationError(
                f"offload {word!r} does not say what goes where; write optimizer=host, params=disk:/nvme or disk:/nvme"
            )
        return "", rest
    part, _, folder = rest.partition(":")
    if not _PART.fullmatch(part):
        part, folder = "", rest
    if folder and place != "disk":
        raise ConfigurationError(
            f"offload {word!r}: {folder!r} is no part (optimizer=host:0.6) and no folder of a disk (params=disk:/nvme)"
        )
    return f"{what}={place}" + (f":{part}" if part else ""), folder


def strategy_of(settings: Settings) -> Named:
    """Return the requested strategy with `--offload`, `--wire` and `--quantize` appended."""
    return offload_of(settings.offload, settings.wire, settings.quantize).applied_to(settings.strategy)


def is_auto(strategy: Named) -> bool:
    return isinstance(strategy, str) and strategy.lower().partition("+")[0] == AUTO


def check_strategy(
    strategy: Named, words: Sequence[str], wire: Sequence[str] = (), quantize: str | None = None
) -> None:
    """Refuse strategies that are wrong for every model and every number of ranks."""
    offload = offload_of(words, wire, quantize)
    for name in strategy.values() if isinstance(strategy, dict) else ():
        layout_of(name)
    asked = offload.applied_to(strategy)
    layouts = layouts_of(asked)
    on_disk = [name for name, layout in layouts.items() if layout.uses_disk]
    if on_disk and offload.folder is None:
        raise ConfigurationError(
            f"strategy {on_disk[0]!r} puts state on disk, and no folder is named for it: --offload disk:/nvme names "
            "one, on a local disk"
        )
    if offload.folder is not None and not on_disk and not is_auto(asked):
        raise ConfigurationError(
            f"offload names the folder {str(offload.folder)!r}, but strategy {next(iter(layouts))!r} puts nothing on "
            "disk: say what goes there, as in params=disk, or leave it out (--offload none)"
        )


def without_unused_folder(settings: Settings) -> Settings:
    """Remove the folder from `offload` if the strategy puts nothing on disk."""
    without = replace(settings, offload=tuple(word for word in settings.offload if "=" in word))
    strategy = strategy_of(without)
    uses_disk = is_auto(strategy) or any(layout.uses_disk for layout in layouts_of(strategy).values())
    return settings if uses_disk else without


def updates_early(settings: Settings) -> bool:
    """Return whether units are updated during the backward: if optimizer state is on the host or on disk, and no update
    needs all gradients, as clipping does. For `auto`, only its moves count: its choice is not known here."""
    if settings.max_grad_norm or settings.precision == "fp16" or settings.skip_nonfinite:
        return False
    return any(layout.optimizer_on != "device" for layout in layouts_of(strategy_of(settings)).values())


def speculation_of(settings: Settings) -> str:
    """The memory for updates before the norm. A save in the background needs what `auto` would take for its copy."""
    return "0" if settings.async_save and settings.speculation == AUTO else settings.speculation


def layouts_of(asked: Named) -> dict[str, Layout]:
    layouts = {}
    for name in asked.values() if isinstance(asked, dict) else [asked]:
        # Instead of `auto`, check the preset that splits most: if any preset allows a move, this one does.
        row = re.sub(r"^[^+]*", MOST_SPLIT, name) if is_auto(asked) else name
        try:
            layouts[name] = layout_of(row)
        except ConfigurationError as error:
            if "=" not in name or not str(error).startswith("layout: "):
                raise
            raise ConfigurationError(f"strategy {name!r}, with what was changed (offload, wire): {error}") from None
    return layouts
