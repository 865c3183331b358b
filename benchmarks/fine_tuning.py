"""Training a Llama on one GPU: the trainer of shardwise compared with Hugging Face's, each in its own process.

    python -m benchmarks.fine_tuning --out benchmarks/results
    python -m benchmarks.fine_tuning --cases 1b --contenders shardwise+compile,shardwise+compile+small-chunks --profile
    python -m benchmarks.fine_tuning --smoke

Weights and tokens are random, and nothing is downloaded. Both trainers get the same configuration of transformers,
batches of the same size, AdamW (fused) and clipping at 1. A contender is the name of a trainer and changes to it,
joined by "+"; `CHANGES` lists them. Those that no setting offers are experiments: they say what a change is worth.
Figures are medians over stretches of steps, after a warm-up, which includes compilation. `--profile` prints where the
time of a step goes. `--smoke` runs small models on the CPU in a minute, without compilation. The loss is that of the
last step, for Hugging Face's trainer the mean of all steps. It shows only that both trained.
"""

import argparse
import dataclasses
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.bench.pages import machine
from shardwise.trainer.loss import Chunks

from .pages import benchmark_page, show, spread, table

FIRST, LIMIT_S = 3, 420  # steps of the warm-up; seconds of a contender
MARK = "fine_tuning: "
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False}
SMOKE = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
         "intermediate_size": 128, "num_hidden_layers": 2}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERYONE = ("hf", "shardwise", "hf+compile", "shardwise+compile")


@dataclass(frozen=True)
class Case:
    about: str
    config: dict[str, Any]
    num_micro: int
    contenders: tuple[str, ...]
    rank: int = 0  # of adapters; 0: all weights are trained
    dtype: str = "float32"  # of the weights that are stored; they are used in bf16
    checkpointing: bool = False
    micro_size: int = 2
    seq: int = 4096

    @property
    def tokens_per_step(self) -> int:
        return self.num_micro * self.micro_size * self.seq


CASES = {
    "1b": Case("Llama 1.24B, all weights", LLAMA_1B, 2, EVERYONE, micro_size=4),
    "8b-lora": Case("Llama 8.03B, LoRA r16 on all linear layers", LLAMA_8B, 2, EVERYONE, 16, "bfloat16"),
    "8b": Case("Llama 8.03B, all weights, bf16 masters, full checkpointing", LLAMA_8B, 4, EVERYONE[2:], 0, "bfloat16",
               checkpointing=True),
}  # fmt: skip
# Published for the case 8b on one H200 by KempnerForge.
PUBLISHED = {"8b": "KempnerForge, published: 10,471 tokens/s, 57.8 % MFU"}


@dataclass(frozen=True)
class Options:
    steps: int  # of a stretch
    stretches: int
    is_profiled: bool
    device: str
    folder: str  # with config.json and tokens.bin

    @property
    def num_steps(self) -> int:
        return FIRST + self.steps * (self.stretches + self.is_profiled)


class Clock:
    """Times stretches of steps. The device is waited for at their ends only. One more stretch may be profiled."""

    def __init__(self, options: Options) -> None:
        self.options, self.num_done, self.began_s = options, 0, time.perf_counter()
        self.first_s = self.mark_s = self.peak_gb = 0.0  # first_s: building, compiling and warm-up
        self.stretches: list[float] = []  # seconds
        self.kernels: dict[str, float] = {}  # ms a step
        self._profiler: Any = None

    def after_step(self) -> None:
        self.num_done += 1
        number, rest = divmod(self.num_done - FIRST, self.options.steps)
        if rest or number < 0:
            return
        has_gpu = self.options.device == "cuda"
        if has_gpu:
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        if number == 0:
            self.first_s = now_s - self.began_s
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
        elif number <= self.options.stretches:
            self.stretches.append(now_s - self.mark_s)
            self.peak_gb = torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0
        if self._profiler is not None:
            self._profiler.stop()
            self.kernels = kernel_times(self._profiler, self.options.steps)
            self._profiler = None
        elif number == self.options.stretches and self.options.is_profiled:
            kinds = torch.profiler.ProfilerActivity
            self._profiler = torch.profiler.profile(activities=[kinds.CUDA if has_gpu else kinds.CPU])
            self._profiler.start()
        self.mark_s = time.perf_counter()

    def measured(self, case: Case, loss: float, planned_bytes: int | None = None) -> dict[str, Any]:
        return {
            "tokens_per_s": [case.tokens_per_step * self.options.steps / seconds for seconds in self.stretches],
            "peak_gb": self.peak_gb,
            "planned_gb": None if planned_bytes is None else planned_bytes / 1e9,
            "loss": loss,
            "first_s": self.first_s,
            "kernels": self.kernels,
        }


def kernel_times(profiler: Any, num_steps: int) -> dict[str, float]:
    """Return the milliseconds of a step by kind of kernel, then those of the kernels that take longest."""
    events = [
        (event.key, (event.self_device_time_total or event.self_cpu_time_total) / 1e3 / num_steps)
        for event in profiler.key_averages()
    ]
    kinds: dict[str, float] = defaultdict(float)
    for name, ms in events:
        kinds[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))] += ms
    longest = sorted(events, key=lambda event: -event[1])[:NUM_KERNELS]
    return {**dict(sorted(kinds.items(), key=lambda kind: -kind[1])), **{name[:110]: ms for name, ms in longest}}


NUM_KERNELS = 24
KINDS = {
    "= attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "= products": r"gemm|cutlass|nvjet|xmma|splitk|cublas",
    "= optimizer": r"adam|multi_tensor|lpnorm|foreach",
    "= softmax": r"softmax",
    "= compiled": r"triton",
    "= copies": r"memcpy|memset|copy_kernel|direct_copy|FillFunctor",
    "= other": r"",
}


def train_ours(case: Case, words: list[str], options: Options) -> dict[str, Any]:
    from shardwise.core import mesh
    from shardwise.trainer.checks import completed
    from shardwise.trainer.loop import run_steps
    from shardwise.trainer.out_of_memory import FailureContext
    from shardwise.trainer.run import set_up
    from shardwise.trainer.settings import Lora, Settings

    clock, changed = Clock(options), {"compile": "off"}
    for word in words:
        changed |= CHANGES[word](case)
    values = {
        "model": str(Path(options.folder) / "config.json"),
        "random_weights": True,
        "tokenizer": "bytes",
        "train_file": (str(Path(options.folder) / "tokens.bin"),),
        "token_dtype": "uint32",
        "eval_fraction": 0.0,
        "seq_length": case.seq,
        "per_device_train_batch_size": case.micro_size,
        "gradient_accumulation_steps": case.num_micro,
        "max_steps": options.num_steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "precision": "pure-bf16" if case.dtype == "bfloat16" and not case.rank else "bf16",
        "lora": Lora(r=case.rank, targets=TARGETS) if case.rank else None,
        "gradient_checkpointing": "full" if case.checkpointing else "none",
        "device": options.device,
        "output_dir": str(Path(options.folder) / "run"),
        **changed,
    }
    mesh.init(device=options.device)
    run = set_up(completed(Settings(**values), options.device == "cuda"), FailureContext())
    run_steps(run, clock.after_step)
    return clock.measured(case, run.records.last[-1].loss, run.planned.peak_bytes)


def train_theirs(case: Case, words: list[str], options: Options) -> dict[str, Any]:
    import transformers

    clock = Clock(options)
    config = transformers.AutoConfig.from_pretrained(options.folder)
    config.use_cache = False
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
    if case.rank:
        import peft

        adapters = peft.LoraConfig(r=case.rank, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    tokens = np.fromfile(Path(options.folder) / "tokens.bin", dtype=np.uint32).astype(np.int64).reshape(-1, case.seq)
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(options.folder) / "hf"),
        per_device_train_batch_size=case.micro_size,
        gradient_accumulation_steps=case.num_micro,
        max_steps=options.num_steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        bf16=True,
        gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if case.checkpointing else None,
        torch_compile="compile" in words,
        save_strategy="no",
        logging_steps=10**6,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
    )

    class AfterStep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.after_step()

    rows = [{"input_ids": row, "labels": row} for row in torch.from_numpy(tokens)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[AfterStep()])
    return clock.measured(case, float(trainer.train().training_loss))


def prefer_attention(*names: str) -> dict[str, Any]:
    """Choose the attention kernels for the rest of the process, the first of `names` first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True).__enter__()
    return {}


def set_inductor(**options: Any) -> dict[str, Any]:
    import torch._inductor.config as config

    for name, value in options.items():
        setattr(config, name, value)
    return {}


def keep_loss() -> dict[str, Any]:
    """Do not compile the softmax of the chunked loss."""
    from shardwise.trainer import run

    run.Chunks = lambda size, _: Chunks(size)  # type: ignore[assignment, misc]
    return {}


def keep_parts() -> dict[str, Any]:
    """Leave the parts of transformers as they are."""
    from shardwise.trainer.models import build

    build.use_fused_parts = lambda _: 0
    return {}


def search_documents() -> dict[str, Any]:
    """Let transformers search for documents in each forward, for which the host waits."""
    from shardwise.trainer.models import headloss

    headloss._documents_known = lambda *_: nullcontext()  # type: ignore[assignment]
    return {}


def use_in_tree(case: Case) -> dict[str, Any]:
    names = {2048: "llama-3.2-1b", 4096: "llama-3-8b", 64: "tiny"}
    return {"model": names[case.config["hidden_size"]], "shape": {"vocab": case.config.get("vocab_size", 128256)}}


# Each returns settings, or changes something for the rest of the process.
CHANGES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "compile": lambda _: {"compile": "on"},
    "in-tree": use_in_tree,
    "plain-parts": lambda _: keep_parts(),
    "search": lambda _: search_documents(),
    "small-chunks": lambda _: {"loss_chunk": "small"},
    "large-chunks": lambda _: {"loss_chunk": "large"},
    "plain-loss": lambda _: keep_loss(),
    "selective": lambda _: {"gradient_checkpointing": "selective"},
    "saved": lambda _: {"gradient_checkpointing": "none"},
    "cudnn": lambda _: prefer_attention("CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH"),
    "flash": lambda _: prefer_attention("FLASH_ATTENTION", "MATH"),
    "max-autotune": lambda _: set_inductor(max_autotune=True),
    "descent": lambda _: set_inductor(coordinate_descent_tuning=True),
    "reduce-bf16": lambda _: {"reduce_dtype": "bf16"},
}


def run_worker(text: str) -> None:
    asked = json.loads(text)
    case, options = Case(**asked["case"]), Options(**asked["options"])
    trainer, *words = asked["contender"].split("+")
    found = (train_ours if trainer == "shardwise" else train_theirs)(case, words, options)
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def measure(case: Case, contender: str, options: Options) -> dict[str, Any]:
    """Run a contender in its own process. An error is its last line."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**LLAMA, **case.config, "dtype": case.dtype}))
        num_rows = options.num_steps * case.num_micro * case.micro_size + 1
        rows = np.random.default_rng(0).integers(0, {**LLAMA, **case.config}["vocab_size"], (num_rows, case.seq))
        rows.astype(np.uint32).tofile(Path(folder) / "tokens.bin")
        asked = {
            "case": dataclasses.asdict(case),
            "options": dataclasses.asdict(dataclasses.replace(options, folder=folder)),
            "contender": contender,
        }
        command = [sys.executable, "-m", "benchmarks.fine_tuning", "--worker", json.dumps(asked)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S} s"}
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK)), None)
    if line is None:
        return {"error": next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")[:300]}
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


def table_of(runs: dict[str, dict[str, Any]]) -> str:
    """The contenders of one case, each with its speed relative to Hugging Face's trainer with the same settings."""
    rows = []
    for name, run in runs.items():
        if "error" in run:
            rows.append([f"`{name}`", run["error"], "", "", "", "", ""])
            continue
        peer = runs.get("hf+compile" if "compile" in name else "hf", {})
        ratio = "" if "error" in peer or not peer else f"{speed(run) / speed(peer):.2f}"
        planned = "" if run["planned_gb"] is None else f"{run['planned_gb']:.1f}"
        cells = [spread(run["tokens_per_s"], 0), ratio, f"{run['peak_gb']:.1f}", planned]
        rows.append([f"`{name}`", *cells, f"{run['first_s']:.0f}", f"{run['loss']:.3f}"])
    titles = ["", "tokens/s", "x HF's", "peak GB", "planned GB", "s before", "loss"]
    return table(titles, rows)


def speed(run: dict[str, Any]) -> float:
    return statistics.median(run["tokens_per_s"])


def main() -> None:
    asked = parsed()
    if asked.worker:
        run_worker(asked.worker)
        return
    now = datetime.datetime.now()
    options = Options(asked.steps, asked.stretches, asked.profile, "cuda" if torch.cuda.is_available() else "cpu", "")
    cases = {name: CASES[name] for name in asked.cases.split(",")}
    if asked.smoke:
        options = dataclasses.replace(options, steps=2, stretches=2, device="cpu")
        cases = {
            name: dataclasses.replace(case, config={**case.config, **SMOKE}, seq=64) for name, case in cases.items()
        }
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for name, case in cases.items():
        runs[name] = {}
        usual = EVERYONE[:2] if asked.smoke else case.contenders
        for contender in asked.contenders.split(",") if asked.contenders else usual:
            found = runs[name][contender] = measure(case, contender, options)
            print(f"{name} {contender}: {json.dumps({**found, 'kernels': ''})}", flush=True)
            for kernel, ms in found.get("kernels", {}).items():
                print(f"  {ms:8.2f} ms  {kernel}", flush=True)
    after = []
    for name, case in cases.items():
        sizes = f"{case.num_micro} x {case.micro_size} sequences of {case.seq} tokens"
        after += [f"## {case.about}, {sizes}", table_of(runs[name]), *filter(None, [PUBLISHED.get(name)])]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    page = benchmark_page(
        "fine_tuning",
        "Training a Llama compared with Hugging Face's trainer",
        now,
        machine(device, torch.__version__),
        figures={"runs": runs},
        before=[" ".join((__doc__ or "").split("\n\n")[-1].split())],
        after=after,
    )
    show(page, asked.out)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--contenders", help=f"default: those of each case; changes: {', '.join(CHANGES)}")
    parser.add_argument("--steps", type=int, default=4, help="of a stretch")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
