"""The strategies of other libraries, in ours: the only file of this package that knows a preset's name."""

# DeepSpeed's stages.
STAGES = ("ddp", "zero1", "zero2", "zero3")
# DeepSpeed's stage 3 with a second copy in each node (hpZ), and in groups of its own (MiCS).
STAGE_3_WITH_A_COPY_PER_NODE = "hpz"
IN_GROUPS = "hsdp"

# torch's FSDP and Accelerate, by name and by number.
SHARDING_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
NUMBERS = {str(number): name for number, name in enumerate(SHARDING_STRATEGIES, 1)}
# One process for each device, and nothing split.
REPLICATED = "ddp"

# Whether parameters are dropped after a forward, by FSDP's name; one that splits nothing has none to drop.
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
# The same in groups that hold equal copies.
IN_COPIES = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
