"""Versions of the packages that runs need, and of the extras."""

import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ..version import VERSION
from . import Finding

TOPIC = "software"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
NEEDED = ("safetensors", "typer", "rich", "pydantic", "PyYAML", "psutil")
EXTRAS = {
    "transformers": ("Hugging Face models and their tokenizers", "hf"),
    "tokenizers": ("tokenizers of Hugging Face models", "hf"),
    "peft": ("LoRA", "hf"),
    "datasets": ("Hugging Face data sets", "hf"),
    "accelerate": ("Hugging Face's Trainer and Accelerate on top of us", "hf"),
    "lightning-fabric": ("Lightning Fabric on top of us", "fabric"),
    "torchao": ("8-bit optimizers", "eight-bit"),
    "tensorboard": ("--report-to tensorboard", "tensorboard"),
    "wandb": ("--report-to wandb", "wandb"),
}


def look() -> Iterator[Finding]:
    yield Finding(TOPIC, "shardwise", VERSION, "this package")
    yield _at_least("python", platform.python_version(), OLDEST_PYTHON, sys.executable)
    yield _torch()
    for package in NEEDED:
        yield _needed(package)
    for package, (use, extra) in EXTRAS.items():
        found = installed(package)
        fix = f"pip install 'shardwise[{extra}]' if you want it" if found is None else ""
        yield Finding(TOPIC, package, found or "not installed", f"for {use}", "ok", fix)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Finding:
    found = installed("torch")
    if found is None:
        return Finding(TOPIC, "torch", "not installed", "everything computes with it", "broken", "pip install torch")
    import torch

    return _at_least("torch", torch.__version__, OLDEST_TORCH, f"built for {_built_for()}")


def _built_for() -> str:
    import torch

    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPUs only"


def _at_least(name: str, found: str, oldest: tuple[int, int], meaning: str) -> Finding:
    numbers = [int(number) for number in re.findall(r"\d+", found)[:2]]
    if tuple(numbers) >= oldest:
        return Finding(TOPIC, name, found, meaning)
    wanted = ".".join(str(number) for number in oldest)
    return Finding(TOPIC, name, found, meaning, "broken", f"install {name} {wanted} or newer")


def _needed(package: str) -> Finding:
    found = installed(package)
    if found is None:
        return Finding(TOPIC, package, "not installed", "the command line needs it", "broken", f"pip install {package}")
    return Finding(TOPIC, package, found, "needed by the command line")
