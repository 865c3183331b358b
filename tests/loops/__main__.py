"""`python -m tests.loops`: run the scenarios and print how they came out; nothing is written."""

import argparse
import fnmatch
import sys
import time

from tests.harness import Pool
from tests.loops import catalogue
from tests.loops.frame import ALL, SCENARIOS, Frame, Outcome, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.loops", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of scenarios or of themes")
    parser.add_argument("--strategies", default=",".join(ALL), help="comma-separated")
    parser.add_argument("--sure", action="store_true", help="try failures again in fresh ranks")
    parser.add_argument("--detail", action="store_true", help="print tracebacks and stacks of failures")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the deadlines, for slow machines")
    args = parser.parse_args()
    names = [
        name
        for name, chosen in SCENARIOS.items()
        if any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(chosen.theme, p) for p in args.patterns)
    ]
    pool = Pool()
    frame = Frame(pool, args.patience)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    try:
        for setting in args.strategies.split(","):
            for name in names:
                try:
                    outcomes.append(frame.run(name, setting, args.sure))
                except AssertionError as error:  # it fails in one process
                    print(error, file=sys.stderr, flush=True)
                    continue
                if not outcomes[-1].passes:
                    print(f"{time.monotonic() - began:6.1f} s  {outcomes[-1]}", file=sys.stderr, flush=True)
                    if args.detail:
                        print(outcomes[-1].detail, file=sys.stderr, flush=True)
    finally:
        pool.close()
    num_themes = len(catalogue.THEMES)
    print(f"{len(names)} scenarios of {num_themes} themes, {time.monotonic() - began:.0f} s\n\n{table(outcomes)}")
    sys.exit(any(not outcome.passes for outcome in outcomes))


if __name__ == "__main__":
    main()
