"""What a Trainer's arguments ask of other engines is refused in a sentence that says what to write instead."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.integrations.arguments import refuse_arguments
from shardwise.integrations.transformers import sharded
from tests.integrations.scripts import Sentences, arguments, forget_accelerate, tiny_llama

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepspeed": ({"deepspeed": "ds.json"}, "**sw.from_deepspeed('ds.json').words"),
    "fsdp": ({"fsdp": ["full_shard"]}, "**sw.from_accelerate(FILE).words"),
    "parallelism": ({"parallelism_config": object()}, "strategy='hsdp'"),
    "compile": ({"torch_compile": True}, "layer.compile()"),
    "bf16 evaluation": ({"bf16_full_eval": True}, "leave it out"),
    "fp16 evaluation": ({"fp16_full_eval": True}, "leave it out"),
    "batch size": ({"auto_find_batch_size": True}, "`shardwise plan`"),
    "each node": ({"save_on_each_node": True}, "file system that all ranks share"),
    "activations": ({"activation_offloading": True}, "+activations=host"),
    "DataParallel": ({"n_gpu": 4}, "torchrun --nproc-per-node 4"),
    "reentrant": ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "leave use_reentrant out"),
    "lomo": ({"optim": "adalomo"}, "early_update=True"),
}


class Given:
    """Arguments as they are after all that TrainingArguments does with them, some of which is not installed here."""

    def __init__(self, given: dict[str, Any]) -> None:
        vars(self).update(given)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    given, reason = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        refuse_arguments(Given(given))  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"TrainingArguments({next(iter(given))}=")
    assert reason in message
    assert "\n" not in message


def test_what_is_common_is_accepted(tmp_path: Path) -> None:
    refuse_arguments(arguments(tmp_path, 1, gradient_checkpointing=True, bf16=True, gradient_checkpointing_kwargs={}))


def new_trainer(folder: Path, words: dict[str, Any], **changes: Any) -> Trainer:
    forget_accelerate()
    return sharded(Trainer, **words)(
        model=tiny_llama(), args=arguments(folder, 1, **changes), train_dataset=Sentences()
    )


def test_a_real_deepspeed_file_is_refused_by_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 2}}))
    with pytest.raises(ConfigurationError, match="from_deepspeed"):
        new_trainer(tmp_path, {}, deepspeed=str(tmp_path / "ds.json"))


def test_words_of_a_deepspeed_file_are_taken(tmp_path: Path) -> None:
    words = sw.from_deepspeed({"zero_optimization": {"stage": 3}}).words
    trainer = new_trainer(tmp_path, words, max_steps=1)
    trainer.train()
    assert "zero3" in sw.describe(trainer.model)


def test_a_contradiction_and_a_misspelt_word_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"precision='fp32' and mixed_precision='bf16'.*contradict"):
        new_trainer(tmp_path, {"precision": "fp32"}, bf16=True)
    with pytest.raises(ConfigurationError, match=r"sharded\(Trainer, \.\.\.\): .*did you mean 'strategy'"):
        sharded(Trainer, stratgy="zero3")


def test_hints_for_ddp_are_told_to_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        new_trainer(tmp_path, {}, ddp_find_unused_parameters=False)
    assert [record.getMessage() for record in caplog.records if record.name == "shardwise"] == [
        "ddp_find_unused_parameters=False: for DistributedDataParallel, no effect here"
    ]


@pytest.mark.slow
def test_deepspeed_need_not_be_there() -> None:
    """Accelerate shows some of its names only where it is."""
    code = "import sys; sys.modules['deepspeed'] = None; import shardwise.integrations.transformers"
    subprocess.run([sys.executable, "-c", code], check=True)
