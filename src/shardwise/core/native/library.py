"""The C code of this folder as a library: compiled by the system's compiler at first use and cached for later runs.

The file's name is a hash of everything it depends on (source, flags, compiler, processor). It is built under another
name and renamed, so that several ranks, or machines that share a home folder, can build it at the same time. A file
that another user could have written is not loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = sorted(Path(__file__).with_name("c").iterdir())
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",  # so that square roots are one instruction
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
PROCESSOR = Path("/proc/cpuinfo")
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # `enum dtype` in c/dtypes.h; 0: none

logger = logging.getLogger("shardwise")


class BuildError(Exception):
    """The library could not be built or must not be loaded."""


def struct_fields(**names_by_type: str) -> list[tuple[str, Any]]:
    """The fields of a C struct in their order, from the names of each ctypes type."""
    return [(name, getattr(ctypes, kind)) for kind, names in names_by_type.items() for name in names.split()]


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None with one warning where it cannot be built."""
    try:
        return load(build(cache_folder()))
    except (BuildError, OSError) as error:
        logger.warning(
            "host updates and codecs run on torch's own operations, which are slower: %s; install a C compiler (cc, "
            "gcc or clang) and let XDG_CACHE_HOME or ~/.cache be a folder that this user can write to",
            error,
        )
        return None


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardwise"


def build(folder: Path) -> Path:
    """Return the library's file in `folder`; compile it if it is missing."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C compiler among {', '.join(COMPILERS)}")
    version = _output([compiler, "--version"])
    named_after = (*(source.read_text() for source in SOURCES), *FLAGS, version, platform.machine(), _processor())
    key = hashlib.sha256("\0".join(named_after).encode()).hexdigest()[:20]
    file = folder / f"host-{key}.so"
    if not file.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            built = Path(own) / file.name
            units = [str(source) for source in SOURCES if source.suffix == ".c"]
            _output([compiler, *FLAGS, *units, "-o", str(built), "-lm"])
            built.chmod(0o600)
            built.rename(file)
    return file


def load(file: Path) -> ctypes.CDLL:
    for path in (file, file.parent):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise BuildError(
                f"{path} has owner {status.st_uid} and mode {status.st_mode & 0o777:o}, and must be this user's "
                f"({os.getuid()}) and not writable by others; remove it"
            )
    return ctypes.CDLL(str(file))


def _processor() -> str:
    """The lines of /proc/cpuinfo that -march=native depends on."""
    if not PROCESSOR.is_file():
        return platform.processor()
    first = PROCESSOR.read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(("model name", "flags", "CPU part", "Features")))


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
