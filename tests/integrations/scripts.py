"""Scripts of the libraries, as people have them: the same code runs plain in one process and sharded on ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 20
GLOBAL_BATCH = 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens of no language, with a part that is not learnt, which differs in length."""

    def __init__(self, num_samples: int = 64, seq: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 61, (num_samples, seq), generator=generator)
        self.skipped = torch.randint(0, seq - 2, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[: self.skipped[index]] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def tiny_llama(seed: int = 3, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **ends, **changes}))


def arguments(folder: Path | str, num_ranks: int, **changes: Any) -> TrainingArguments:
    """A global batch that does not depend on the number of ranks, in two micro-batches."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // 2 // num_ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**given, **changes})


def forget_accelerate() -> None:
    """What one Accelerator has set up would be another one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def logged(trainer: Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def torchrun(*command: str, cwd: Path) -> str:
    """What a script on two processes prints."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
