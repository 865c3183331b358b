"""Keys of `fsdp_config`: every spelling of each, and those that change nothing here.

Accelerate's begin with `fsdp_` or do not, TrainingArguments' do not, and the plugin of a program has names of its own.
"""

from ..account import Block
from ..rules import ANY, FLAG, MAPPING, TEXT, Rule, ignored, refused

PREFIX = "fsdp_"
# What is read: the name here, and the names elsewhere.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "version": ("version",),
    "sharding_strategy": ("sharding_strategy",),
    "reshard_after_forward": ("reshard_after_forward",),
    "offload_params": ("offload_params", "cpu_offload"),
    "auto_wrap_policy": ("auto_wrap_policy",),
    "transformer_layer_cls_to_wrap": (
        "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "transformer_cls_to_wrap",
    ),
    "min_num_params": ("min_num_params",),
    "state_dict_type": ("state_dict_type",),
    "activation_checkpointing": ("activation_checkpointing",),
    "activation_checkpointing_offload": ("activation_checkpointing_offload",),
}  # fmt: skip

# What is not: they change when something travels, or how a model is made, and never what is trained.
UNREAD: dict[str, Rule] = {
    "cpu_ram_efficient_loading": ignored(
        FLAG, "every rank loads the weights; sw.load_full_state_dict takes those of rank 0"
    ),
    "sync_module_states": ignored(FLAG, "that all ranks have the same weights is checked before anything is sharded"),
    "use_orig_params": ignored(FLAG, "parameters are always the model's own"),
    "backward_prefetch": ignored(TEXT, "what the backward gathers next is always gathered ahead"),
    "backward_prefetch_policy": ignored(TEXT, "what the backward gathers next is always gathered ahead"),
    "forward_prefetch": ignored(FLAG, "what the forward gathers next is always gathered ahead"),
    "limit_all_gathers": ignored(FLAG, "one unit is gathered ahead; memory_budget of sw.shard allows more"),
    "final_state_dict_type": ignored(TEXT, "what is written at the end follows from state_dict_type"),
    "ignored_modules": refused(ANY, "every parameter of a model is sharded; leave it out"),
    "ignored_parameters": refused(ANY, "every parameter of a model is sharded; leave it out"),
    "mixed_precision_policy": refused(ANY, "it is never read from a file; mixed_precision says it"),
    "state_dict_config": refused(ANY, "only a program can make one; state_dict_type says which kind"),
    "optim_state_dict_config": refused(ANY, "only a program can make one; state_dict_type says which kind"),
    "param_init_fn": refused(ANY, "only a program can name a function"),
    "xla": refused(FLAG, "there are no TPUs here, only CUDA GPUs and CPUs"),
    "xla_fsdp_v2": refused(FLAG, "there are no TPUs here, only CUDA GPUs and CPUs"),
    "xla_fsdp_settings": refused(MAPPING, "there are no TPUs here, only CUDA GPUs and CPUs"),
    "xla_fsdp_grad_ckpt": refused(FLAG, "there are no TPUs here, only CUDA GPUs and CPUs"),
}
UNREAD |= {f"{PREFIX}{key}": rule for key, rule in UNREAD.items()}

# In any spelling.
KNOWN = {*UNREAD, *(prefix + word for words in SPELLINGS.values() for word in words for prefix in (PREFIX, ""))}


def spelled(block: Block, name: str) -> str:
    """The key that says it in this block. A second one is needless where it says the same, else refused."""
    every = [prefix + word for word in SPELLINGS[name] for prefix in (PREFIX, "")]
    written = [key for key in every if block.has(key)]
    for key in written[1:]:
        if str(block.values[key]).lower() == str(block.values[written[0]]).lower():
            block.ignored(key, f"{written[0]} says the same")
        else:
            block.refused(key, f"{written[0]} says {block.values[written[0]]}; leave one of them")
    return written[0] if written else every[0]
