"""Keys of Accelerate that say where ranks run, how many there are, and where machines meet."""

from typing import Any

from ..account import Block

DEFAULT_PORT = 29500
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")


def read_launch(top: Block, is_single: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    place = top.word("compute_environment", ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "LOCAL_MACHINE")
    if place == "LOCAL_MACHINE":
        top.ignored("compute_environment", "ranks run where they are started")
    else:
        top.refused("compute_environment", "nothing is started on SageMaker here; write LOCAL_MACHINE")
    if top.flag("use_cpu"):
        settings["device"] = "cpu"
    top.used("use_cpu", f"device {'cpu' if 'device' in settings else 'cuda, where there is one'}")
    settings |= _ranks(top, is_single)
    settings |= _devices(top, settings)
    settings |= _meeting(top, settings.get("nnodes", "1") != "1")
    return settings


def _ranks(top: Block, is_single: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    machines = top.whole("num_machines", 1, least=1)
    if top.has("num_machines"):
        settings["nnodes"] = str(machines)
    top.used("num_machines", f"nnodes {machines}")
    ranks = top.whole("num_processes", -1, least=-1)
    if is_single:
        top.used("num_processes", "nproc_per_node 1: distributed_type NO is one process, whatever this says")
        return settings | {"nproc_per_node": 1}
    if ranks < 1:
        if top.has("num_processes") and ranks == 0:
            top.refused("num_processes", "it must be at least 1")
        top.ignored("num_processes", "the number of ranks is given where they are started")
        return settings
    if ranks % machines:
        top.refused("num_processes", f"it is not a multiple of num_machines {machines}: it counts all machines' ranks")
    else:
        settings["nproc_per_node"] = ranks // machines
        top.used("num_processes", f"nproc_per_node {ranks // machines} ({ranks} in all)")
    return settings


def _devices(top: Block, settings: dict[str, Any]) -> dict[str, Any]:
    """`gpu_ids`, which says how many ranks there are where nothing else does."""
    ids = [word.strip() for word in top.text("gpu_ids", "all").split(",")]
    if ids[0].lower() in ("all", "none", ""):
        top.ignored("gpu_ids", "ranks take the devices that they see, in order")
        return {}
    if ids != [str(number) for number in range(len(ids))]:
        told = f"set CUDA_VISIBLE_DEVICES={','.join(ids)} where ranks are started, and leave it out"
        top.refused("gpu_ids", f"ranks take the devices that they see, in order: {told}")
    elif "nproc_per_node" not in settings:
        top.used("gpu_ids", f"nproc_per_node {len(ids)}: ranks take the devices that they see, in order")
        return {"nproc_per_node": len(ids)}
    top.ignored("gpu_ids", "ranks take the devices that they see, in order")
    return {}


def _meeting(top: Block, has_many: bool) -> dict[str, Any]:
    """Machines meet at a host and a port; a rank of a machine is for the backend `static`, Accelerate's default."""
    rank = top.whole("machine_rank", 0, least=0)
    backend = top.word("rdzv_backend", BACKENDS, BACKENDS[0])
    host, port = top.text("main_process_ip"), top.whole("main_process_port", DEFAULT_PORT, least=0, most=65535)
    if not has_many:
        for key in ("machine_rank", "rdzv_backend", "main_process_ip", "main_process_port"):
            top.ignored(key, "there is one machine, and it meets nobody")
        return {}
    settings: dict[str, Any] = {"rdzv_backend": backend}
    if top.has("machine_rank"):
        settings["node_rank"] = rank
    top.used("machine_rank", f"node_rank {rank}")
    top.used("rdzv_backend", f"rdzv_backend {backend}")
    if host:
        settings["rdzv_endpoint"] = f"{host}:{port}"
    for key in ("main_process_ip", "main_process_port"):
        top.used(key, f"rdzv_endpoint {host or 'HOST, which has to be given'}:{port}")
    return settings
