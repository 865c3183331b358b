"""Entries for ranks that test the launcher, and a command that launches one: `python -m tests.support.launching`.

    python -m tests.support.launching ENTRY FOLDER [SETTING=JSON ...]

The entries do without the engine, so that a rank is ready as soon as torch is imported. They say what they do to
files in the run folder, because that is where tests look.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardwise.base.errors import ShardwiseError
from shardwise.trainer import checks
from shardwise.trainer import rank_watcher as watch
from shardwise.trainer.launcher import launch
from shardwise.trainer.settings import Settings, settings_from_json
from shardwise.trainer.signals import Requests


def _folder(settings: str) -> Path:
    return Path(str(settings_from_json(settings).output_dir))


def _say(settings: str, text: str) -> None:
    (_folder(settings) / f"said-{os.environ['RANK']}").write_text(text)


def tell(settings: str) -> int:
    """What the rank was given."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    found: dict[str, Any] = {name: os.environ.get(name) for name in names}
    found["settings"] = json.loads(settings)
    _say(settings, json.dumps(found))
    print(f"rank {os.environ['RANK']} was here")
    return 0


def stop_when_asked(settings: str) -> int:
    """A loop that takes 0.2 s to save."""
    requests = Requests(_folder(settings))
    _say(settings, str(os.getpid()))
    while requests.read()[0] is None:
        time.sleep(0.02)
    time.sleep(0.2)
    _say(settings, "saved")
    code, _ = requests.read()
    assert code is not None
    return code


def talk_until_asked(settings: str) -> int:
    """To whoever listens, as a run does: while it goes, and when it has saved."""
    _say(settings, str(os.getpid()))
    requests = Requests(_folder(settings))
    while requests.read()[0] is None:
        print("a step", flush=True)
        time.sleep(0.001)
    time.sleep(0.2)
    print("saved", flush=True)
    _say(settings, "saved")
    code, _ = requests.read()
    assert code is not None
    return code


def never_stop(settings: str) -> int:
    _say(settings, str(os.getpid()))
    time.sleep(600)
    return 0


def break_then_follow(settings: str) -> int:
    """Rank 1 fails; rank 0 notices by losing it, and is the first to be gone."""
    broken = _folder(settings) / "broken"
    if os.environ["RANK"] == "1":
        try:
            raise ValueError("the true cause")
        finally:
            broken.touch()
    while not broken.exists():
        time.sleep(0.001)
    raise RuntimeError("connection closed by peer")


def crash_once(settings: str) -> int:
    mark = _folder(settings) / "crashed"
    if os.environ["RANK"] == "0" and not mark.exists():
        mark.touch()
        raise ValueError("only the first time")
    _say(settings, os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(600)
    return 0


def be_killed(settings: str) -> int:
    """Rank 1 goes without a word; rank 0 waits where no signal is heard."""
    if os.environ["RANK"] == "1":
        print("the last that was heard of it", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)
    return 0


def refuse_alone(settings: str) -> NoReturn:
    if os.environ["RANK"] == "0":
        sys.exit(2)
    time.sleep(600)
    raise AssertionError


def add_up(settings: str) -> int:
    """The ranks find each other."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    _say(settings, str(int(total)))
    dist.destroy_process_group()
    return 0


def meet(settings: str) -> int:
    """The ranks have communicators, and tell where the store is. They go on when there is a file for each."""
    from shardwise.core import mesh

    mesh.init(device="cpu", timeout_s=60)
    mesh.connect(mesh.make_axes(None))
    mesh.hosts()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _say(settings, json.dumps([os.getpid(), *address, os.environ["TORCHELASTIC_RUN_ID"]]))
    while not (_folder(settings) / f"go-{os.environ['RANK']}").exists():
        time.sleep(0.02)
    mesh.leave()
    return 0


def come_late(settings: str) -> int:
    """Rank 1 never joins."""
    from shardwise.core import mesh

    if os.environ["RANK"] == "1":
        time.sleep(600)
    mesh.init(device="cpu", timeout_s=3)
    raise AssertionError


def end_late(settings: str) -> int:
    """Rank 1 does not come to an end."""
    _say(settings, str(os.getpid()))
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return 0


def _hang(settings: str, hang: Callable[[], None]) -> int:
    """A whole run whose last rank hangs when it takes the samples of its sixth batch."""
    from shardwise.core import mesh
    from shardwise.trainer.data.samples import Samples
    from shardwise.trainer.run import run_rank

    mesh._limits.hang_s = 1.0
    batch, num_calls = Samples.batch, 0

    def hanging(samples: Samples, *arguments: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if os.environ["RANK"] == "1" and num_calls == 6:
            hang()
        return batch(samples, *arguments, **more)

    Samples.batch = hanging  # type: ignore[method-assign]
    return run_rank(settings)


def hang_in_data(settings: str) -> int:
    return _hang(settings, lambda: time.sleep(600))


def stop_in_a_step(settings: str) -> int:
    return _hang(settings, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def starve(settings: str) -> int:
    """A whole run whose last rank finds no memory in the forward of a block, its fourth."""
    import torch

    from shardwise.trainer.model import Block
    from shardwise.trainer.run import run_rank

    forward, num_calls = Block.forward, 0

    def starving(block: Block, x: Any, *others: Any) -> Any:
        nonlocal num_calls
        num_calls += not x.is_meta
        if os.environ["RANK"] == "1" and num_calls == 4 and not x.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")
        return forward(block, x, *others)

    Block.forward = starving  # type: ignore[method-assign]
    return run_rank(settings)


def main() -> int:
    entry, folder, *words = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if os.isatty(0):
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one that a session's leader opens becomes its terminal
    checks.look_ahead = lambda *_: None
    watch.AFTER_A_DEATH_S = watch.AFTER_A_REFUSAL_S = watch.STOPPED_S = 1.0
    given = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    settings = Settings(**{"output_dir": folder, "device": "cpu", **given})
    try:
        origin = dict.fromkeys(given, "flag")
        return launch(settings, origin, entry=f"tests.support.launching:{entry}")
    except ShardwiseError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
