"""What Slurm's variables say about this process. Pure: they are an argument.

`srun` with a task per rank has made the ranks already; with a task per node it has made the launchers, which have to
find each other. A batch script that calls no `srun` is an ordinary process on the first node.
"""

import re
from collections.abc import Mapping

from ..base.errors import ConfigurationError

Variables = Mapping[str, str]


def num_tasks(variables: Variables) -> int:
    return int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or 1)


def num_nodes(variables: Variables) -> int:
    return int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)


def is_step(variables: Variables) -> bool:
    """Whether srun has started this process; the variables of a batch script look much the same."""
    return "SLURM_PROCID" in variables and ("SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables)


def is_rank(variables: Variables) -> bool:
    return is_step(variables) and num_tasks(variables) > num_nodes(variables)


def rank_variables(variables: Variables) -> dict[str, str]:
    """Torchrun's variables for a task that is a rank."""
    node = int(variables.get("SLURM_NODEID", "0"))
    local_rank = variables.get("SLURM_LOCALID", "0")
    # With a GPU bound to each task it is the only one that is seen, whatever the task's number: all are 0 then.
    if variables.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:
        local_rank = "0"
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks(variables)),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(tasks_by_node(_tasks_per_node(variables))[node]),
        "MASTER_ADDR": first_host(node_list(variables)),
        "MASTER_PORT": str(port(variables)),
    }


def node_list(variables: Variables) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    found = next((variables[name] for name in names if variables.get(name)), None)
    if found is None:
        raise ConfigurationError(f"a Slurm step without {' or '.join(names)}: set MASTER_ADDR, or give --rdzv-endpoint")
    return found


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: gpu[003-006,9],cpu1 begins with gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigurationError(f"a list of nodes that names none: {nodes!r}; give --rdzv-endpoint HOST:PORT")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def tasks_by_node(text: str) -> list[int]:
    """8(x2),7 is 8, 8 and 7 tasks."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def port(variables: Variables) -> int:
    """The same on every node, another for another step, and below those that the kernel hands out."""
    job = int(variables.get("SLURM_JOB_ID", "0"))
    step = int(variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or 0)
    return 15000 + (8 * job + step) % 15000


def _tasks_per_node(variables: Variables) -> str:
    return variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or "1"
