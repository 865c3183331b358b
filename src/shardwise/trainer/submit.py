"""Files to submit: a script for Slurm, a job for Kubernetes. They run the command that made them, once per machine.

Both give the run time to save before it is ended, and go on from its last checkpoint when it is started again. What
only the cluster's users know (accounts, images, volumes, hours) stands at the top, or is marked EDIT.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from .settings import Settings, num_nodes

GPUS = 8  # of a machine, where nothing is said
SAVE_S = 120
PORT = 29400
REFUSALS = (2, 3, 4, 5, 130)  # trying again would end in the same way, or somebody has stopped it

_SLURM = """\
#!/bin/bash
# {what}
# sbatch this file; add --account, --partition and the hours that you need.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --time=24:00:00
#SBATCH --signal=USR1@{save_s}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log

run={run}

# One task per node, with all of its cores; the tasks find each other by Slurm's variables.
srun --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    {command} --output-dir "$run"{resume}
code=$?

# 143: out of time, or preempted, after a complete save. Anything else is for you to look at.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_K8S = """\
# {what}
# kubectl apply -f this file, after the lines marked EDIT.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # the machines meet before any of them is ready
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {retries}
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes:
          containerName: train
          operator: In
          values: {refusals}
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
  template:
    metadata:
      labels:
        job-name: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {grace_s}
      containers:
        - name: train
          image: shardwise:latest  # EDIT: an image with shardwise, and with what the command names
          command: ["bash", "-c"]
          args: [{script}]
          env:
            - name: PYTHONUNBUFFERED
              value: "1"
{resources}          volumeMounts:
            - name: runs
              mountPath: {mount}
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: runs
          persistentVolumeClaim:
            claimName: shardwise-runs  # EDIT: a volume that all machines can write
        - name: shm
          emptyDir:
            medium: Memory
"""


def slurm(settings: Settings, words: Sequence[str]) -> str:
    """A script for sbatch. `words` are those of the command line, behind `shardwise train`."""
    low, high = num_nodes(settings.nnodes)
    gpus = "" if settings.device == "cpu" else f"#SBATCH --gpus-per-node={settings.nproc_per_node or GPUS}\n"
    name = _name(settings)
    # The job keeps its number when it is queued again.
    run = shlex.quote(settings.output_dir) if settings.output_dir else f'"runs/{name}-$SLURM_JOB_ID"'
    return _SLURM.format(
        what=_what(words),
        name=name,
        nodes=low if low == high else f"{low}-{high}",
        gpus=gpus,
        save_s=SAVE_S,
        run=run,
        resume=_resume(settings),
        command=shlex.join(["shardwise", "train", *words]),
    )


def k8s(settings: Settings, words: Sequence[str]) -> str:
    """A Service, by which the machines find each other, and an Indexed Job with a pod per machine."""
    _, nodes = num_nodes(settings.nnodes)
    name = _name(settings)
    mount = "/runs"
    # On the volume that all machines write to, wherever the image starts its processes.
    folder = settings.output_dir or name
    run = folder if folder.startswith("/") else f"{mount}/{folder.removeprefix('runs/')}"
    gpus = f"resources:\n  limits:\n    nvidia.com/gpu: {settings.nproc_per_node or GPUS}\n"
    meeting = f' --node-rank "$JOB_COMPLETION_INDEX" --rdzv-endpoint {name}-0.{name}:{PORT}' if nodes > 1 else ""
    # exec: the signal that ends a pod goes to its first process only.
    command = f"exec {shlex.join(['shardwise', 'train', *words])}"
    script = f"{command}{meeting} --output-dir {shlex.quote(run)}{_resume(settings)}"
    return _K8S.format(
        what=_what(words),
        name=name,
        nodes=nodes,
        retries=3 * nodes,
        refusals=json.dumps(REFUSALS),
        grace_s=SAVE_S,
        # Kubernetes reads $(NAME) and $$ itself.
        script=json.dumps(re.sub(r"\$(?=[$(])", "$$", script)),
        resources="" if settings.device == "cpu" else _indented(gpus),
        mount=mount,
    )


def _resume(settings: Settings) -> str:
    """A job that is started again goes on; one that begins at a checkpoint has said so, and begins there each time."""
    return "" if settings.resume_from_checkpoint else " --resume-from-checkpoint auto"


def _what(words: Sequence[str]) -> str:
    return shlex.join(["shardwise", "train", *words]).replace("\n", " ")


def _name(settings: Settings) -> str:
    """A name that Kubernetes takes: of the run folder, or of the model."""
    source = PurePath(settings.output_dir or settings.model).name.lower()
    return re.sub(r"[^a-z0-9]+", "-", f"shardwise-{source}").strip("-")[:50].strip("-")


def _indented(text: str) -> str:
    return "".join(f"{' ' * 10}{line}\n" for line in text.splitlines())
