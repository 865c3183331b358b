"""The models that promises are checked on: each by name, with its weights, its data and its loss.

A new model is one entry of `MODELS`. All are tiny, have no dropout, and are drawn from one seed. Data is a function
of a sample's global index alone: sample i is the same tokens on any world, rank and micro-batch. Samples are of one
length and losses are means, so that the mean over equal slices of a batch is the mean over the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape

VOCAB = 61
SEQ = 9
INIT = 0.1  # as large as the tiny widths want; with the 0.02 of large models the first steps amplify rounding
BATCH = 12  # divides into the slices of 1, 2, 3, 4, 6 or 12 ranks and micro-batches


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]

    def fresh(self, seed: int = 0) -> nn.Module:
        """The model with the same weights whoever asks, in training mode."""
        torch.manual_seed(seed)
        return self.build().train()


def tokens(step: int, index: int = 0, num_slices: int = 1, batch: int = BATCH) -> Tensor:
    """One of `num_slices` equal slices of a step's global batch, (samples, SEQ)."""
    if batch % num_slices:
        raise ValueError(f"a batch of {batch} does not divide into {num_slices} slices")
    length = batch // num_slices
    first = step * batch + index * length
    return torch.stack([_sample(first + offset) for offset in range(length)])


def _sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 + index)
    # Skewed, so that there is something to learn and the losses fall.
    return (torch.rand(SEQ, generator=generator).pow(3) * VOCAB).long()


def _in_tree(tied: bool) -> nn.Module:
    # Five blocks: more units than gather slots, and an odd number of them. The root keeps the final norm.
    return Transformer(
        TransformerShape(vocab=VOCAB, hidden=24, layers=5, heads=2, kv_heads=1, ffn=41, max_seq=SEQ, tied=tied)
    )


def _in_tree_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            initializer_range=INIT,
            n_positions=SEQ,
            n_embd=16,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            initializer_range=INIT,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=SEQ,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            initializer_range=INIT,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=SEQ,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def _hugging_face_loss(model: nn.Module, batch: Tensor) -> Tensor:
    # By keyword, and out of a ModelOutput, as their users do it.
    return model(input_ids=batch, labels=batch).loss


MODELS: dict[str, Model] = {
    "in-tree": Model(lambda: _in_tree(tied=False), _in_tree_loss),
    "in-tree tied": Model(lambda: _in_tree(tied=True), _in_tree_loss),
    "gpt2": Model(_gpt2, _hugging_face_loss),
    "llama": Model(_llama, _hugging_face_loss),
    "qwen3": Model(_qwen3, _hugging_face_loss),
    "t5": Model(_t5, _hugging_face_loss),
}

IN_TREE = "in-tree"
HUGGING_FACE = ["gpt2", "llama", "qwen3", "t5"]
