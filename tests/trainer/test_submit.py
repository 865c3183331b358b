"""The files to submit are what their readers take: bash, sbatch's option names, Kubernetes' fields."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.cluster import kubernetes_job as k8s
from shardwise.trainer.cluster import slurm_script as slurm
from shardwise.trainer.settings import Settings

WORDS = ["my config.yaml", "--nnodes", "4", "--sample-prompt", "it's $HOME"]
FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun.txt
exit ${CODE:-0}
"""


def run_script(script: str, folder: Path, **variables: str) -> tuple[int, list[str]]:
    """The script with an srun that writes down what it was given, and a scontrol that does the same."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", FAKE_SRUN), ("scontrol", '#!/bin/bash\necho "$@" > scontrol.txt\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "96", **variables}
    seen = subprocess.run(["bash", "job.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not seen.stderr
    return seen.returncode, (folder / "srun.txt").read_text().splitlines()


def test_the_slurm_script_asks_for_what_the_settings_say() -> None:
    script = slurm(Settings(nnodes="4", nproc_per_node=2, output_dir="runs/my run"), WORDS)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "2"
    assert options["signal"] == "USR1@120"
    assert "requeue" in options
    assert "gpus" not in slurm(Settings(device="cpu"), [])
    assert "--nodes=2-3" in slurm(Settings(nnodes="2:3"), [])


def test_the_slurm_script_runs_the_command_as_it_was_typed(tmp_path: Path) -> None:
    code, given = run_script(slurm(Settings(output_dir="runs/my run"), WORDS), tmp_path)
    assert code == 0
    assert given == [
        "--kill-on-bad-exit=1", "--cpu-bind=none", "--cpus-per-task=96",
        "shardwise", "train", *WORDS, "--output-dir", "runs/my run", "--resume-from-checkpoint", "auto",
    ]  # fmt: skip
    assert not (tmp_path / "scontrol.txt").exists()


def test_the_slurm_script_is_queued_again_when_time_is_up(tmp_path: Path) -> None:
    script = slurm(Settings(), [])
    code, given = run_script(script, tmp_path, CODE="143")
    assert code == 143
    assert given[-4:] == ["--output-dir", "runs/shardwise-tiny-7", "--resume-from-checkpoint", "auto"]
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    (tmp_path / "scontrol.txt").unlink()
    assert run_script(script, tmp_path, CODE="4")[0] == 4
    assert not (tmp_path / "scontrol.txt").exists(), "a diverged run would diverge again"


def test_a_run_that_goes_on_from_somewhere_says_so_itself(tmp_path: Path) -> None:
    _, given = run_script(slurm(Settings(resume_from_checkpoint="there"), []), tmp_path)
    assert "--resume-from-checkpoint" not in given


def parsed(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(text)
    return service, job


def test_the_job_for_kubernetes() -> None:
    service, job = parsed(k8s(Settings(nnodes="4", nproc_per_node=2, output_dir="/runs/My_run"), WORDS))
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == name == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    assert job["spec"]["completionMode"] == "Indexed"
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (script,) = container["args"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    _, _, command = script.partition("exec ")
    assert shlex.split(command) == [
        "shardwise", "train", *WORDS, "--node-rank", "$JOB_COMPLETION_INDEX",
        "--rdzv-endpoint", f"{name}-0.{name}:29400", "--output-dir", "/runs/My_run",
        "--resume-from-checkpoint", "auto",
    ]  # fmt: skip
    assert json.loads(str(job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"])) == [2, 3, 4, 5, 130]


def test_the_pod_resumes(tmp_path: Path) -> None:
    _, job = parsed(k8s(Settings(device="cpu", output_dir="a run"), []))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    script = container["args"][0].replace("exec shardwise", "echo shardwise")
    first = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert first.stdout == "shardwise train --output-dir /runs/a run --resume-from-checkpoint auto\n", "on the volume"


def test_what_kubernetes_would_read_is_escaped() -> None:
    _, job = parsed(k8s(Settings(output_dir="/runs/x"), ["--sample-prompt", "$(date) for $$5, $HOME"]))
    (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "'$$(date) for $$$5, $HOME'" in script, "$$ becomes $, and a $ before anything else is one"


@pytest.mark.parametrize("write", [slurm, k8s])
def test_numbers_of_machines_are_checked_here_too(write: Any) -> None:
    with pytest.raises(ConfigurationError, match="nnodes"):
        write(Settings(nnodes="many"), [])
