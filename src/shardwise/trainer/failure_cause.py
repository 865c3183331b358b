"""Why the ranks of a machine failed, in words: the first of them to fail, once, and where those were that hung."""

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from .rank_notes import Ended
from .rank_watcher import POLL_S, Seen

LAST_LINES, LAST_BYTES = 15, 1 << 20
MOST_HUNG = 4  # that are told of
# A death is noticed this late; a rank that raised so shortly before it was probably its victim.
NOTICED_S = 5 * POLL_S
# What failed on one rank, and was told to all: any of them may have raised it first.
_TOLD_BY = re.compile(r"rank (\d+): ")


def first_failure(
    ranks: Mapping[int, Seen], endings: Mapping[int, Ended], reported: Mapping[int, tuple[int, int]], host: str
) -> str:
    """All by local rank. `reported` is the agent's word: the rank and the exit code of one that failed."""
    return "\n".join([_first_failure(ranks, endings, reported, host), *_hung(ranks)])


def _hung(ranks: Mapping[int, Seen]) -> list[str]:
    """Ranks that had to be killed: the first one may have failed because it waited for them."""
    places = [seen.where for seen in ranks.values() if seen.is_killed and seen.where]
    more = [f"and {len(places) - MOST_HUNG} more"] if len(places) > MOST_HUNG else []
    return ["did not end by themselves, and were killed:", *places[:MOST_HUNG], *more] if places else []


def _first_failure(
    ranks: Mapping[int, Seen], endings: Mapping[int, Ended], reported: Mapping[int, tuple[int, int]], host: str
) -> str:
    raised = sorted((end for end in endings.values() if end.code is None), key=lambda end: end.time_s)
    silent = sorted(
        (seen for rank, seen in ranks.items() if _died_silently(seen) and rank not in endings),
        key=lambda seen: seen.gone_s or 0.0,
    )
    if silent and not (raised and raised[0].time_s < (silent[0].gone_s or 0.0) - NOTICED_S):
        first = silent[0]
        _, code = reported.get(first.started.local_rank, (first.started.rank, first.status))
        return _death(first.started.rank, code if first.status is None else first.status, first.started.log, host)
    if raised:
        return _failure(raised[0], ranks, host)
    rank_number, code = next(iter(reported.values()), (-1, 1))
    return _death(rank_number, code, "", host)


def _failure(first: Ended, ranks: Mapping[int, Seen], host: str) -> str:
    told_by = _TOLD_BY.match(first.error)
    number = int(told_by[1]) if told_by else ranks[first.local_rank].started.rank
    rank = next((seen.started for seen in ranks.values() if seen.started.rank == number), None)
    where = f"on {host}" if rank else "on another machine"
    log = f"\nits log: {rank.log}" if rank and rank.log else ""
    return f"rank {number} {where} failed:\n\n{first.error[told_by.end() if told_by else 0 :]}{log}"


def _died_silently(seen: Seen) -> bool:
    return seen.gone_s is not None and not seen.is_killed and seen.status != 0


def _death(rank: int, code: int | None, log: str, host: str) -> str:
    """A rank that ended without a word of its own."""
    said = f"\nthe end of its log, {log}:\n\n{_last_lines(log)}" if log else ""
    return f"rank {rank} on {host} {_how(code)}{said}"


def _how(code: int | None) -> str:
    if code is None:
        return "died"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _last_lines(log: str) -> str:
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            text = file.read(LAST_BYTES).decode(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(text.splitlines()[-LAST_LINES:])
