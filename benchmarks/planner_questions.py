"""Twenty questions that people ask, answered by `shardwise plan` and checked by hand.

python -m benchmarks.planner_questions prints the table of docs/planner.md, and on the standard error the processor time
of each answer. A number of each plan is compared with arithmetic that fits on an envelope: P is the number of
parameters. States include gradients that autograd allocates whole: of the embedding, and of the experts of two layers.
For speed a person assumes 40 % of the peak on H100, and 55 % on A100.
"""

import contextlib
import io
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from shardwise.cli import main

Json = dict[str, Any]


class Question(NamedTuple):
    """`number`: what to read from the plan, in `unit`. `hand`: the same by hand. Both are expressions."""

    text: str
    command: str
    answer: str  # with {value} and {best}
    number: str
    hand: str
    tolerance: float


SPEED = "(6 * 7.5e9 + 12 * 32 * 4096 * 4096)"  # FLOP for a token of Llama 3 8B with 4096 tokens a sample
LONG = f"100e9 * {SPEED}"

QUESTIONS = (
    Question("Does full fine-tuning of 70B fit on 8 x H100-80GB?", "llama-3-70b --gpus 8xH100-80GB --seq 4096",
             "not on the GPUs alone: {value:.0f} GB of states on each, of 85 GB; with {best}",
             "states('zero3')", "16 * P / 8 / 1e9 + 2 * 128256 * 8192 / 1e9", 0.01),
    Question("How many H100 does it need without offload?", "llama-3-70b --gpus 8xH100-80GB --seq 4096 --fit",
             "{value:.0f} GPUs", "best['cluster']['world_size']", "8 * math.ceil(16 * P / (85 - 20) / 1e9 / 8)", 0),
    Question("And 405B on 16 nodes of 8 x H200?", "llama-3.1-405b --gpus 128xH200-141GB --seq 4096",
             "yes, with {best}: {value:.0f} GB of states on each, of 150 GB",
             "states('zero3')", "16 * P / 128 / 1e9 + 2 * 128256 * 16384 / 1e9", 0.01),
    Question("LoRA or QLoRA of 70B on 2 x 24 GB?", "llama-3-70b --lora 16 --gpus 2xRTX-4090 --seq 1024",
             "not on the GPUs alone: {value:.0f} GB of weights on each, of 25 GB (18 GB in 4 bits: `--quantize "
             "nf4`); with {best}", "size('zero3', 'params')", "2 * P / 2 / 1e9", 0.01),
    Question("LoRA of 70B on 8 x H100-80GB?", "llama-3-70b --lora 16 --gpus 8xH100-80GB --seq 2048",
             "yes, with {best}: {value:.1f} GB of weights on each",
             "size('zero3', 'params')", "2 * P / 8 / 1e9", 0.01),
    Question("ZeRO-2 for 13B on 8 x A100-40GB?", "llama-2-13b --gpus 8xA100-40GB --seq 2048",
             "no: {value:.0f} GB of states on each, of 42 GB", "states('zero2')", "(2 + 16 / 8) * P / 1e9", 0.01),
    Question("ZeRO-3 for 13B on 8 x A100-40GB?", "llama-2-13b --gpus 8xA100-40GB --seq 2048 --strategy zero3",
             "yes: {value:.0f} GB of states on each", "states('zero3')",
             "16 * P / 8 / 1e9 + 2 * 32000 * 5120 / 1e9", 0.01),
    Question("What does 7B with Adam need without sharding?", "llama-2-7b --gpus 8xH100-80GB --strategy ddp",
             "{value:.0f} GB of states: too much", "states('ddp')", "(2 + 4 + 12) * P / 1e9", 0.01),
    Question("What does 8-bit Adam make of the optimizer of 8B on 8 GPUs?",
             "llama-3-8b --gpus 8xH100-80GB --optimizer adamw8bit --strategy zero3",
             "{value:.2f} GB on each, masters included", "size('zero3', 'optimizer')",
             "(4 + 2 * (1 + 4 / 256)) * P / 8 / 1e9", 0.01),
    Question("Full fine-tuning of Mixtral 8x7B on 16 H100-80GB?", "mixtral-8x7b --gpus 16xH100-80GB --seq 2048",
             "with {best}: {value:.0f} GB of states on each", "states('zero3')",
             "16 * P / 16 / 1e9 + 2 * 2 * 8 * 3 * 4096 * 14336 / 1e9", 0.01),
    Question("What do logits cost with the usual cross-entropy, 8B with 8192 tokens?",
             "llama-3-8b --gpus 8xH100-80GB --seq 8192 --loss plain --strategy zero3",
             "{value:.1f} GB", "size('zero3', 'loss')", "(4 + 4 + 4) * 8192 * 128256 / 1e9", 0.02),
    Question("And the activations of 8B with 8192 tokens and full checkpointing?",
             "llama-3-8b --gpus 8xH100-80GB --seq 8192 --checkpointing full --strategy zero3", "{value:.1f} GB",
             "size('zero3', 'activations')", "2 * 8192 * 4096 * (32 + 28) / 1e9", 0.25),
    Question("How much does a GPU send in a step of ZeRO-3, 8B on 8?", "llama-3-8b --gpus 8xH100-80GB --strategy zero3",
             "{value:.0f} GB", "sent('zero3', 'intra_node')", "7 / 8 * (2 * 2 + 4) * P / 1e9", 0.06),
    Question("And of ZeRO-1?", "llama-3-8b --gpus 8xH100-80GB --strategy zero1",
             "{value:.1f} GB", "sent('zero1', 'intra_node')", "7 / 8 * (4 + 2) * P / 1e9", 0.01),
    Question("How much does HSDP send between two nodes of 8?", "llama-3-8b --gpus 16xH100-80GB --strategy hsdp",
             "{value:.2f} GB per GPU", "sent('hsdp', 'inter_node')", "2 * 1 / 2 * 4 * P / 8 / 1e9", 0.01),
    Question("How much host memory does offload of 8B take?",
             "llama-3-8b --gpus 8xH100-80GB --strategy zero2_offload --speculation 0", "{value:.0f} GB in a node",
             "best['host_bytes'] / 1e9", "(4 + 8 + 4 + 2) * P / 1e9", 0.05),
    Question("How long do 100B tokens take for 8B on 64 H100?",
             "llama-3-8b --gpus 64xH100-80GB --seq 4096 --tokens 100B", "{value:.1f} days with {best}",
             "best['days']", f"{LONG} / (64 * 0.4 * 989.5e12) / 86400", 0.2),
    Question("And at $2.5 per GPU-hour?", "llama-3-8b --gpus 64xH100-80GB --seq 4096 --tokens 100B --price 2.5",
             "${value:,.0f}", "best['dollars']", f"{LONG} / (0.4 * 989.5e12) / 3600 * 2.5", 0.2),
    Question("What do 128 A100-80GB cost for it at $1.6?",
             "llama-3-8b --compare 64xH100,128xA100-80GB --seq 4096 --tokens 100B --price H100=2.5,A100-80GB=1.6",
             "${value:,.0f}", "clusters[1]['dollars']", f"{LONG} / (0.55 * 312e12) / 3600 * 1.6", 0.2),
    Question("How many H100 train it in 14 days?",
             "llama-3-8b --gpus 8xH100-80GB --seq 4096 --tokens 100B --days 14", "{value:.0f} GPUs",
             "best['cluster']['world_size']", f"8 * math.ceil({LONG} / (0.4 * 989.5e12 * 14 * 86400) / 8)", 0),
)  # fmt: skip


def plan(command: str) -> Json:
    """Run `shardwise plan COMMAND --json` in this process."""
    printed = io.StringIO()
    words = mock.patch.object(sys, "argv", ["shardwise", "plan", *command.split(), "--json"])
    with words, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    found: Json = json.loads(printed.getvalue())
    return found


def checked(question: Question) -> tuple[str, float, float]:
    """Return the answer in words, its number, and the number by hand."""
    made = plan(question.command)
    rows = {row["name"]: row for row in made.get("strategies", ())}
    clusters, at = made.get("clusters"), made["recommended"]
    best = clusters[at] if clusters else rows.get(at, next(iter(rows.values())))

    def size(name: str, *classes: str) -> float:
        return sum(rows[name]["per_gpu_bytes"][kind] for kind in classes) / 1e9

    names = {
        "math": math, "P": made["model"]["num_params"], "best": best, "clusters": clusters, "size": size,
        "states": lambda name: size(name, "params", "grads", "optimizer"),
        "sent": lambda name, wire: rows[name]["traffic_bytes"][wire] / 1e9,
    }  # fmt: skip
    value, hand = (float(eval(text, names)) for text in question[3:5])  # noqa: S307 (written above)
    return question.answer.format(value=value, best=best.get("label", best["name"])), value, hand


def table() -> Iterator[str]:
    yield "| question | `shardwise plan` | answer | by hand | off |"
    yield "|---|---|---|---|---|"
    for question in QUESTIONS:
        begin_s = time.process_time()
        answer, value, hand = checked(question)
        assert abs(value / hand - 1) <= question.tolerance, (question, value, hand)
        print(f"{time.process_time() - begin_s:.2f} s  {question.command}", file=sys.stderr)
        arithmetic = re.sub(r"math\.", "", question.hand)
        off = f"{value / hand - 1:+.1%}, of {question.tolerance:.0%}"
        yield f"| {question.text} | `{question.command}` | {answer} | {arithmetic} = {hand:,.4g} | {off} |"


if __name__ == "__main__":
    print("\n".join(table()))
