"""Versions of the packages that runs need, and of the extras."""

import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ..version import VERSION
from . import Finding, judged

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
    if installed("torch") is None:
        yield Finding(TOPIC, "torch", "not installed", "everything computes with it", "broken", "pip install torch")
    else:
        import torch

        kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        built_for = next((f"{kind} {number}" for kind, number in kinds.items() if number is not None), "CPUs only")
        yield _at_least("torch", torch.__version__, OLDEST_TORCH, f"built for {built_for}")
    for package in NEEDED:
        found = installed(package)
        fix = f"pip install {package}" if found is None else ""
        yield judged(TOPIC, package, found or "not installed", "needed by the command line", fix, "broken")
    for package, (use, extra) in EXTRAS.items():
        found = installed(package)
        fix = f"pip install 'shardwise[{extra}]' if you want it" if found is None else ""
        yield Finding(TOPIC, package, found or "not installed", f"for {use}", "ok", fix)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _at_least(name: str, found: str, oldest: tuple[int, int], meaning: str) -> Finding:
    is_old = tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < oldest
    fix = f"install {name} {oldest[0]}.{oldest[1]} or newer" if is_old else ""
    return judged(TOPIC, name, found, meaning, fix, "broken")
