"""Saving and loading beside the peers, in one run: synchronous and asynchronous saves, loads, and exports.

    python -m benchmarks.checkpoints [--shape 500m] [--contenders shardwise:zero3,dcp:1,deepspeed:3] [--device cpu] ...

Every repetition starts every contender once, in fresh processes (torchrun), one after the other; see
`checkpoint_contenders.py` for what they do. Ratios are taken within a repetition. At the end the last checkpoint of
shardwise is exported, and the exported files copied with `cp`: both from a cold page cache and until the disk has them.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.bench.pages import commit, processor
from shardwise.trainer.settings import Settings

from .checkpoint_contenders import SHAPES, Job, forget, num_params, sync
from .pages import benchmark_page, show

ROOT = Path(__file__).parent.parent
Runs = dict[str, list[dict[str, Any]]]  # by contender, in the order of the repetitions


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="500m", choices=SHAPES)
    parser.add_argument("--contenders", default="disk,shardwise:zero3,shardwise:zero2,dcp:1,deepspeed:3")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--saves", type=int, default=1, help="of a repetition, after one that is not counted")
    parser.add_argument("--loads", type=int, default=1, help="of a repetition, after one that is not counted")
    parser.add_argument("--steps", type=int, default=3, help="to know how long one takes, and at least beside a save")
    parser.add_argument("--exports", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/shardwise-checkpoints"), help="on the disk to use")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one contender's run")
    parser.add_argument("--out", type=Path, help="a folder for the dated results")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------
# running


def launch(options: argparse.Namespace, contender: str, folder: Path) -> dict[str, Any]:
    """What all ranks saw, or why there is nothing."""
    job = Job(contender, options.shape, options.device, str(folder), options.saves, options.loads, options.steps)
    answer = options.folder / "answer.json"
    answer.unlink(missing_ok=True)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    words += ["-m", "benchmarks.checkpoint_contenders", json.dumps(asdict(job)), str(answer)]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    try:
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {options.timeout:g} s"}
    if not answer.is_file():
        lines = [line for line in ended.stderr.splitlines() if "Error" in line]
        return {"error": lines[0].strip() if lines else f"exit code {ended.returncode}"}
    return json.loads(answer.read_text())


def export(options: argparse.Namespace, checkpoint: Path) -> list[dict[str, float]]:
    """`shardwise export` of weights as they are, and `cp` of what came of it."""
    exported, copied = (options.folder / name for name in ("exported", "copied"))
    settings = Settings(model="tiny", shape=asdict(SHAPES[options.shape]))
    (checkpoint.parent.parent / "config.json").write_text(settings.to_json())  # as in a run's folder
    words = [sys.executable, "-m", "shardwise", "export", checkpoint, exported, "--dtype", "keep"]
    found = []
    for _ in range(options.exports):
        for folder in (exported, copied):
            shutil.rmtree(folder, ignore_errors=True)
        forget(checkpoint)
        os.sync()
        began = time.perf_counter()
        said, most = output_and_memory([str(word) for word in words])
        whole_s = time.perf_counter() - began
        began = time.perf_counter()
        sync(exported)
        rest_s = time.perf_counter() - began
        forget(exported)
        began = time.perf_counter()
        subprocess.run(["cp", "-r", exported, copied], check=True)
        sync(copied)
        copy_s = time.perf_counter() - began
        found.append(
            {
                "num_bytes": sum(file.stat().st_size for file in exported.iterdir()),
                "export_s": float(said.split(" in ")[-1].split()[0]) + rest_s,
                "command_s": whole_s + rest_s,
                "copy_s": copy_s,
                "memory_bytes": most,
                "idle_memory_bytes": output_and_memory([*map(str, words[:3]), "inspect", str(checkpoint)])[1],
            }
        )
    return found


def output_and_memory(words: list[str]) -> tuple[str, int]:
    """What a command said last, and the largest memory that it had, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, code, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(words)}: exit code {process.returncode}")
    return said.strip().splitlines()[-1], usage.ru_maxrss * 1024


# ---------------------------------------------------------------------------------------------------------
# figures


def counted(run: dict[str, Any], what: str, key: str) -> float:
    """The median of a run's saves or loads, without the first one; of several ranks the slowest, or the largest."""
    return statistics.median(max(rank[what][n][key] for rank in run["ranks"]) for n in range(1, num(run, what)))


def num(run: dict[str, Any], what: str) -> int:
    return len(run["ranks"][0][what])


MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "save": lambda run: counted(run, "saves", "returned_s"),
    "save, on the disk": lambda run: counted(run, "saves", "on_disk_s"),
    "load": lambda run: counted(run, "loads", "seconds"),
}


def delays(run: dict[str, Any], what: str) -> dict[str, float]:
    """What an asynchronous save costs, in seconds: its call, that and the step it is in, and that and all steps."""
    ranks = run["ranks"]
    alone = [rank["steps_s" if what == "async" else "waits_s"] for rank in ranks]
    step_s = statistics.median(max(each) for each in zip(*alone, strict=True))
    found = []
    for n in range(1, num(run, what)):
        call_s = max(rank[what][n]["call_s"] for rank in ranks)
        steps = ranks[0][what][n]["steps_s"]
        found.append((call_s, call_s + steps[0] - step_s, call_s + sum(steps) - len(steps) * step_s))
    medians = [statistics.median(values) for values in zip(*found, strict=True)]
    return {"step": step_s, **dict(zip(("call", "first step", "all steps"), medians, strict=True))}


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    each = list(values)
    if not each:
        return ""
    middle = form.format(statistics.median(each))
    return middle if len(each) == 1 else f"{middle} ({form.format(min(each))}-{form.format(max(each))})"


def ratios(runs: Runs, ours: str, peer: str, measure: Callable[[dict[str, Any]], float]) -> list[float]:
    pairs = zip(runs[ours], runs[peer], strict=True)
    return [measure(b) / measure(a) for a, b in pairs if "error" not in a and "error" not in b]


def good(runs: Runs, contender: str) -> list[dict[str, Any]]:
    return [run for run in runs[contender] if "error" not in run]


def tables(runs: Runs, exports: list[dict[str, float]]) -> list[str]:
    lines = []
    ours = [name for name in runs if name.startswith("shardwise")]
    peers = [name for name in runs if name.partition(":")[0] in ("dcp", "deepspeed", "disk")]
    for title, measure in MEASURES.items():
        lines += ["", f"| {title} | seconds | GB/s | {' | '.join(f'{peer} / it' for peer in peers)} |"]
        lines += [f"|{'---|' * (3 + len(peers))}"]
        for name in runs:
            if not good(runs, name):
                lines.append(f"| `{name}` | {runs[name][0]['error']} |")
                continue
            seconds = [measure(run) for run in good(runs, name)]
            rate = good(runs, name)[0]["ranks"][0]["num_bytes"] / 1e9 / statistics.median(seconds)
            against = [spread(ratios(runs, name, peer, measure)) if name in ours else "" for peer in peers]
            lines.append(f"| `{name}` | {spread(seconds, '{:.3f}')} | {rate:.2f} | {' | '.join(against)} |")
    lines += [
        "",
        "| memory of a rank beside what it holds, MB | save | load | GB of the checkpoint |",
        "|---|---|---|---|",
    ]
    for name in runs:
        for run in good(runs, name)[:1]:
            most = [max(counted(one, what, "memory_bytes") for one in good(runs, name)) for what in ("saves", "loads")]
            size = run["ranks"][0]["num_bytes"]
            lines.append(f"| `{name}` | {most[0] / 1e6:.0f} | {most[1] / 1e6:.0f} | {size / 1e9:.2f} |")
    for what, title in (("async", "saves beside steps that compute"), ("async, waiting", "beside steps that wait")):
        lines += ["", f"| {title} | step s | call s | step of the call | all steps until it is done |"]
        lines += ["|---|---|---|---|---|"]
        for name in runs:
            each = [run for run in good(runs, name) if num(run, what)]
            if each:
                found = [(delays(run, what), counted(run, "saves", "on_disk_s")) for run in each]
                cells = [spread((late[key] for late, _ in found), "{:.3f}") for key in ("step", "call")]
                for key in ("first step", "all steps"):
                    share = spread((100 * late[key] / save_s for late, save_s in found), "{:.0f}")
                    cells.append(f"{spread((late[key] for late, _ in found), '{:.3f}')} s, {share} % of a save")
                lines.append(f"| `{name}` | {' | '.join(cells)} |")
    if exports:
        speed = [run["copy_s"] / run["export_s"] for run in exports]
        beside = max(run["memory_bytes"] - run["idle_memory_bytes"] for run in exports)
        lines += ["", "| export | s | with its start s | `cp` and sync s | cp / export | GB | MB beside `inspect` |"]
        lines += ["|---|---|---|---|---|---|---|"]
        cells = [spread((run[key] for run in exports), "{:.3f}") for key in ("export_s", "command_s", "copy_s")]
        size = exports[0]["num_bytes"] / 1e9
        lines += [f"| `shardwise export` | {' | '.join(cells)} | {spread(speed)} | {size:.2f} | {beside / 1e6:.0f} |"]
    return lines


NOTE = """Medians over the repetitions (min-max): of each the median of its saves and loads after a first one. `save`
is until every rank's call returned, `on the disk` until an fsync of all its files did. Loads are from a cold page
cache (of this machine; of what is below it nothing is known), and everything was compared with what was saved. `X / it`
is X's time over that row's, within a repetition: above 1, the row is faster. `disk` writes and reads as many bytes and
does nothing else. Delays of saves beside steps are against steps without one, in seconds and in percent of the same
contender's own synchronous save; the first such save, which makes memory, is not counted. Steps that wait take as long
and compute nothing, as where another device computes."""


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    contenders = options.contenders.split(",")
    runs: Runs = {name: [] for name in contenders}
    checkpoint = options.folder / "run" / "checkpoints" / "step-000001"
    for repetition in range(options.repetitions):
        for name in contenders:
            is_ours = name.startswith("shardwise")
            place = checkpoint if is_ours else options.folder / "peer"
            began = time.perf_counter()
            run = launch(options, name, place)
            runs[name].append(run)
            told = run.get("error") or ", ".join(f"{what} {measure(run):.3f} s" for what, measure in MEASURES.items())
            print(
                f"{repetition + 1}/{options.repetitions} {name}: {told} ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
            if not is_ours:
                shutil.rmtree(place, ignore_errors=True)
    exports, why_not = list[dict[str, float]](), ""
    if options.exports and (checkpoint / "complete").is_file():
        try:
            exports = export(options, checkpoint)
        except RuntimeError as error:
            why_not = f"Nothing was exported: {error}"
    shutil.rmtree(options.folder)
    about = next((run for name in contenders for run in good(runs, name)), {})
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": about.get("device"),
        "torch": about.get("torch"),
        "commit": commit(),
    }
    note = " ".join(NOTE.split())
    sizes = (
        f"{options.shape}: {num_params(options.shape) / 1e6:.0f}M parameters in fp32, AdamW; {options.ranks} "
        f"ranks, {options.repetitions} repetitions."
    )
    page = benchmark_page(
        "checkpoints",
        "Checkpoints beside the peers",
        datetime.datetime.now(),
        machine,
        figures={"note": note, "runs": runs, "exports": exports},
        before=[f"{sizes} {note}"],
        after=["\n".join(tables(runs, exports)).strip(), *([why_not] if why_not else [])],
    )
    show(page, options.out, f"{options.shape}-{options.device}")


if __name__ == "__main__":
    main()
