"""`shardwise train` as a user runs it: real processes, real signals, real exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from shardwise.trainer.config import resolve
from tests.harness import Pool
from tests.support.running import losses, manual_in, rows, save_llama, train

QUICK = ("--device", "cpu", "--logging-steps", "1", "--sample-tokens", "0", "--no-export")
SMALL = ("--seq-length", "32", "--global-batch-size", "8", "--learning-rate", "1e-2")


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise", "train", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(*words: str, cwd: Path) -> tuple[int, str, str]:
    process = start(*words, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    limit = time.monotonic() + 90
    while time.monotonic() < limit and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(rows(folder)) >= step:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama", hidden=64, layers=3)


@pytest.mark.slow
def test_one_command_trains_saves_samples_and_sums_up(tmp_path: Path) -> None:
    code, out, err = finished("--max-steps", "20", "--output-dir", "run", "--sample-tokens", "40", cwd=tmp_path)
    assert (code, err) == (0, "")
    told = " ".join(out.split())  # lines are as wide as the terminal
    for words in ("auto -> ", " on 2 ranks", "planned peak", "16 samples = 2 ranks x 1 micro-batch x 8", "step 20/20",
                  "perplexity", "unigram entropy", "predicted", "measured", "| The "):  # fmt: skip
        assert words in told
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= {
        "config.json", "plan.json", "traffic.json", "metrics.jsonl", "checkpoints", "export", "logs",
    }  # fmt: skip
    assert (folder / "checkpoints/step-000020/complete").exists()
    assert json.loads((folder / "config.json").read_text())["max_steps"] == 20
    assert rows(folder)[-2]["loss"] < 3.2


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "r=4,alpha=8,targets=q_proj+down_proj"], ids=["full", "lora"])
def test_a_fine_tune_survives_sigterm_on_other_ranks_under_another_strategy(
    run_ranks: Pool, llama: Path, tmp_path: Path, lora: str
) -> None:
    flags = {
        "model": str(llama), "tokenizer": "bytes", "max_steps": "40", "device": "cpu", "logging_steps": "1",
        "sample_tokens": "0", "export": "false", "seq_length": "32", "global_batch_size": "8", "learning_rate": "2e-3",
        # Gradients that are rounding noise must not become steps of full size, different in every order of summation.
        "adam_epsilon": "1e-4", "train_file": str(manual_in(tmp_path)), **({"lora": lora} if lora else {}),
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_ranks, 1, resolve([], {**flags, "output_dir": str(whole)}, {}).settings) == 0
    words = [f"{name}={value}" for name, value in flags.items() if name != "lora"]
    words += ["--output-dir", "parts", *(["--lora", lora] if lora else [])]
    process = start(*words, "--strategy", "zero3", cwd=tmp_path)
    wait_for_step(process, parts, 5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped (terminated)" in out
    num_done = len(losses(parts))
    assert 5 <= num_done < 40
    assert (parts / f"checkpoints/step-{num_done:06d}/complete").exists()
    # All else is in the run's own config.json.
    again = ("--resume-from-checkpoint", "parts", "--nproc-per-node", "4", "--node-size", "2", "--strategy", "hsdp")
    code, out, err = finished(*again, cwd=tmp_path)
    assert code == 0, err
    assert f"from step {num_done} on" in out
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_an_offloaded_run_is_stopped_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """From disk, by SIGTERM, to the host with fewer flags, and to the device: the losses of a run on the device."""
    words = ("--max-steps", "30", "--lr-scheduler-type", "constant", *QUICK, *SMALL)
    code, _, err = finished(*words, "--strategy", "ddp", "--output-dir", "whole", cwd=tmp_path)
    assert code == 0, err
    (tmp_path / "state").mkdir()
    offload = "optimizer=disk:state,params=host,grads=host"
    process = start(*words, "--strategy", "zero3", "--offload", offload, "--output-dir", "parts", cwd=tmp_path)
    wait_for_step(process, tmp_path / "parts", 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "zero3+params=host+grads=host+optimizer=disk on 2 ranks" in " ".join(out.split())
    assert list((tmp_path / "state").iterdir()) == [], "nothing is left behind"
    num_done = len(losses(tmp_path / "parts"))
    on_host = ("--strategy", "zero2", "--offload", "optimizer=host:0.5", "--max-steps", str(num_done + 3))
    for again in (on_host, ("--strategy", "zero1", "--offload", "none", "--max-steps", "30")):
        code, out, err = finished("--resume-from-checkpoint", "parts", *again, cwd=tmp_path)
        assert code == 0, err
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole"), "bit for bit"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = ("--max-steps", "60", "--save-steps", "5", "--max-restarts", "1", *QUICK, *SMALL)
    folder = tmp_path / "run"
    process = start(*words, "--output-dir", "run", cwd=tmp_path)
    wait_for_step(process, folder, 7)
    ranks = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "rank 1 on" in err
    assert "starting again" in err
    assert len(losses(folder)) == 60


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "shardwise", "train", "--max-steps", "3", "--output-dir", "run", *QUICK, *SMALL]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3/3  loss") == 1
    assert len(losses(tmp_path / "run")) == 3


# ---------------------------------------------------------------------------------------------------------
# bad input: one sentence, before any rank exists


@pytest.fixture
def bad_data(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 1}\nnot json\n')
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (tmp_path / "data.xlsx").write_text("a,b")
    row = json.dumps({"prompt": "long " * 100, "completion": "no"})
    (tmp_path / "long.jsonl").write_text(f"{row}\n" * 40)
    (tmp_path / "wide.bin").write_bytes(b"".join(number.to_bytes(4, "little") for number in range(1000)))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/config.json").write_text("{}")
    (tmp_path / "half/checkpoints/step-000010").mkdir(parents=True)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/config.json").write_text('{"model_type": "llama"}')
    save_file({"model.embed_tokens.weight": torch.ones(300, 8)}, tmp_path / "exported/model.safetensors")
    (tmp_path / "narrow.json").write_text('{"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 128}')
    return tmp_path


BAD: dict[str, tuple[int, str]] = {
    "--train-file long.jsonl --packing padded": (2, "no sample of 128 tokens holds anything to train on"),
    "--train-file wide.bin shape.vocab=60000": (2, "every second number is 0"),
    "--train-file nowhere.txt": (2, "train_file nowhere.txt: no such file"),
    "--train-file empty.txt": (2, "empty.txt: is empty"),
    "--train-file blank.jsonl": (2, "blank.jsonl holds no document"),
    "--train-file bad.jsonl --max-bad-rows 1": (2, "bad.jsonl"),
    "--train-file short.txt": (2, "seq_length 128 is longer than the training data"),
    "--train-file latin.txt": (2, "not UTF-8"),
    "--train-file data.xlsx": (2, "an unknown kind"),
    "--dataset ./nowhere": (2, "dataset ./nowhere"),
    "--model nowhere/": (2, "no such folder"),
    "--model pickled": (2, "pickled weights only"),
    "--model narrow.json --tokenizer bytes": (2, "has 257 tokens, but the model's vocabulary is 64"),
    "--model exported --tokenizer bytes": (2, "no data is named"),
    "--tokenizer ./nowhere": (2, "tokenizer ./nowhere: no such folder"),
    "--seq-length 1000": (2, "seq_length 1000 is more than the 512 tokens"),
    "--global-batch-size 5": (2, "global_batch_size 5 is not 2 ranks"),
    "--node-size 3": (2, "does not divide into nodes of 3"),
    "--strategy zero9": (2, "unknown strategy 'zero9'"),
    "--strategy zero3-nvme": (2, "no folder is named for it: --offload disk:/nvme names one"),
    "--strategy zero3-nvme --offload disk:nowhere": (2, "offload: nowhere is not a folder"),
    "--offload optimizer=host,params=dsk": (2, "'dsk' is no place; did you mean 'disk'?"),
    "--strategy ddp --offload params=host --offload optimizer=host": (2, "parameters that are always gathered"),
    "--strategy zero2 --offload optimizer=host:0": (2, "a part, above 0 and at most 1"),
    "--learning-rte 1": (2, "No such option: --learning-rte"),
    "learning_rte=1": (2, "did you mean 'learning_rate'"),
    "nowhere.yaml": (2, "nowhere.yaml"),
    "--output-dir used": (2, "used holds another run"),
    "--output-dir empty.txt/run": (2, "output_dir empty.txt/run: cannot be written: Not a directory"),
    "--resume-from-checkpoint exported": (5, "to begin with its weights: --model exported"),
    "--resume-from-checkpoint nowhere": (5, "resume_from_checkpoint nowhere"),
    "--output-dir half --resume-from-checkpoint latest": (5, "holds no complete checkpoint"),
    "--model 50m --shape layers=x": (2, "layers"),
    "--nnodes 2": (2, "give every machine the same --rdzv-endpoint"),
    "--report-to wandbb": (2, "wandbb"),
    "--device cuda": (2, "torch sees no GPU"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence(
    bad_data: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: nothing of it gets as far as a rank."""
    from shardwise import cli
    from shardwise.trainer import agent

    def no_ranks(*_: object) -> int:
        raise AssertionError("ranks were started")

    code, sentence = BAD[words]
    monkeypatch.chdir(bad_data)
    monkeypatch.setattr(agent, "run_agent", no_ranks)
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", *words.split()])
    before = {path.name for path in bad_data.iterdir()}
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == code, told
    assert sentence in told
    assert told.count("\n") == 1, told
    assert {path.name for path in bad_data.iterdir()} == before, "nothing is left behind"
