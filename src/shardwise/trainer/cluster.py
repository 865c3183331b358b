"""Slurm and Kubernetes: reads Slurm's environment variables, and makes job files to submit.

If `srun` starts one task per rank, each task is a rank. If it starts one task per node, each task is a launcher, and
the launchers have to find each other. Without `srun`, a batch script runs as an ordinary process on the first node.

A job file runs the command that made it, once per node. It gives the run time to save before it is ended, and resumes
from the last checkpoint when it is started again.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import PurePath
from textwrap import indent
from typing import Any

from ..base.errors import ConfigurationError
from .settings import Settings
from .settings import num_nodes as nodes_of

Variables = Mapping[str, str]

DEFAULT_GPUS = 8  # per node
SAVE_S = 120  # seconds for the last save
PORT = 29400
FINAL_CODES = (2, 3, 4, 5, 130)  # exit codes: a restart would fail in the same way, or a user stopped the run


def num_tasks(variables: Variables) -> int:
    return int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or 1)


def num_nodes(variables: Variables) -> int:
    return int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)


def is_step(variables: Variables) -> bool:
    """Return whether srun has started this process. A batch script has almost the same variables."""
    return "SLURM_PROCID" in variables and ("SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables)


def is_rank(variables: Variables) -> bool:
    return is_step(variables) and num_tasks(variables) > num_nodes(variables)


def rank_variables(variables: Variables) -> dict[str, str]:
    """Return torchrun's variables for a task that is a rank."""
    node = int(variables.get("SLURM_NODEID", "0"))
    # Slurm's counts: 8(x2),7 is 8, 8 and 7 tasks.
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or "1"
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    by_node = [count for count, times in counts for _ in range(int(times or 1))]
    local_rank = variables.get("SLURM_LOCALID", "0")
    # If one GPU is bound to each task, it is device 0 of every task.
    if variables.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:
        local_rank = "0"
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks(variables)),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": by_node[node],
        "MASTER_ADDR": first_host(variables),
        "MASTER_PORT": str(port(variables)),
    }


def first_host(variables: Variables) -> str:
    """Return the first host of Slurm's list: gpu003 of gpu[003-006,9],cpu1."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((variables[name] for name in names if variables.get(name)), "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigurationError(
            f"a Slurm step whose {' or '.join(names)} names no node, but is {nodes!r}: set MASTER_ADDR, or give "
            "--rdzv-endpoint"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def port(variables: Variables) -> int:
    """Choose a port: the same on every node, a different one for each Slurm step, below the ephemeral ports."""
    job = int(variables.get("SLURM_JOB_ID", "0"))
    step = int(variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or 0)
    return 15000 + (8 * job + step) % 15000


def slurm_script(settings: Settings, words: Sequence[str]) -> str:
    """Return a script for sbatch. `words`: the arguments after `shardwise train`."""
    low, high = nodes_of(settings.nnodes)
    values = _common_values(settings, words)
    values["nodes"] = low if low == high else f"{low}-{high}"
    values["gpus"] = "" if settings.device == "cpu" else f"#SBATCH --gpus-per-node={values['num_gpus']}\n"
    # A job that is queued again keeps its id, and so its run folder.
    run = f'"runs/{values["name"]}-$SLURM_JOB_ID"'
    values["run"] = shlex.quote(settings.output_dir) if settings.output_dir else run
    return _template("slurm.sh.txt").format(**values)


def kubernetes_job(settings: Settings, words: Sequence[str]) -> str:
    """Return a Service, by which the machines find each other, and an Indexed Job with a pod per machine."""
    _, nodes = nodes_of(settings.nnodes)
    values = _common_values(settings, words)
    name = values["name"]
    # An absolute path on the shared volume: the working directory depends on the image.
    mount, folder = "/runs", settings.output_dir or name
    run = folder if folder.startswith("/") else f"{mount}/{folder.removeprefix('runs/')}"
    gpus = f"resources:\n  limits:\n    nvidia.com/gpu: {values['num_gpus']}\n"
    meeting = f' --node-rank "$JOB_COMPLETION_INDEX" --rdzv-endpoint {name}-0.{name}:{PORT}' if nodes > 1 else ""
    # exec: the signal that ends a pod goes to its first process only.
    script = f"exec {values['command']}{meeting} --output-dir {shlex.quote(run)}{values['resume']}"
    return _template("kubernetes.yaml.txt").format(
        **values,
        nodes=nodes,
        retries=3 * nodes,
        refusals=json.dumps(FINAL_CODES),
        # Kubernetes expands $(NAME) and $$ itself: escape them.
        script=json.dumps(re.sub(r"\$(?=[$(])", "$$", script)),
        resources="" if settings.device == "cpu" else indent(gpus, 10 * " "),
        mount=mount,
    )


def _template(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


def _common_values(settings: Settings, words: Sequence[str]) -> dict[str, Any]:
    command = shlex.join(["shardwise", "train", *words])
    source = PurePath(settings.output_dir or settings.model).name.lower()
    return {
        "command": command,
        "command_line": command.replace("\n", " "),
        # Kubernetes accepts only lower-case letters, digits and hyphens.
        "name": re.sub(r"[^a-z0-9]+", "-", f"shardwise-{source}").strip("-")[:50].strip("-"),
        "num_gpus": settings.nproc_per_node or DEFAULT_GPUS,
        "save_s": SAVE_S,
        # A restarted job resumes from its last checkpoint, unless the command names a checkpoint: then it begins there.
        "resume": "" if settings.resume_from_checkpoint else " --resume-from-checkpoint auto",
    }
