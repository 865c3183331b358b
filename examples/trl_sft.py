"""TRL's supervised fine-tuning under any strategy, in a minute on two CPU processes, with nothing downloaded:

    torchrun --nproc-per-node 2 examples/trl_sft.py
    torchrun --nproc-per-node 2 examples/trl_sft.py --strategy zero2 --lora --max_steps 20

The line that is marked is the one that a script of TRL's changes.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardwise.integrations.transformers import sharded


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def sums(num_samples: int) -> Dataset:
    pairs = [(number % 10, number * 7 % 10) for number in range(num_samples)]
    return Dataset.from_dict(
        {"prompt": [f"{a} + {b} = " for a, b in pairs], "completion": [f"{a + b}" for a, b in pairs]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="runs/trl-sft")
    parser.add_argument("--resume_from_checkpoint", default=None)
    asked = parser.parse_args()

    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64))
    args = SFTConfig(
        output_dir=asked.output_dir,
        max_steps=asked.max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_steps=50,
        eval_strategy="steps",
        eval_steps=50,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = sharded(SFTTrainer, strategy=asked.strategy)(  # was: SFTTrainer(
        model=model,
        args=args,
        train_dataset=sums(256),
        eval_dataset=sums(32),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if asked.lora else None,
    )
    trainer.train(resume_from_checkpoint=asked.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
