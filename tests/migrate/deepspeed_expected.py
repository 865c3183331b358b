"""What the files in fixtures/deepspeed come to: settings, and the keys that are refused.

Each file has the keys of an example that ships with DeepSpeed, Hugging Face's libraries, open-instruct, LLaMA-Factory
or Axolotl, with values of our own.
"""

from typing import Any

LEFT_TO_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
ON_HOST = "+optimizer=host+grads=host"
# The precision is left open.
OPEN = {"skip_nonfinite": True}
IN_16_BITS = {"precision": "bf16", "reduce_dtype": "bf16", "skip_nonfinite": True}

EXPECTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "accelerate_stage2_offload": (
        {
            "strategy": f"zero2{ON_HOST}", "precision": "fp16", "gradient_accumulation_steps": 3, "optimizer": "adamw",
            **LEFT_TO_ADAM, "lr_scheduler_type": "warmup-decay-lr", "warmup_type": "log", "logging_steps": 300,
        },
        set(),
    ),
    "axolotl_stage1_compiled": ({"strategy": "zero1", **OPEN, "compile": "on"}, set()),
    "axolotl_stage3_params_on_host": (
        {"strategy": "zero3", **IN_16_BITS, "export": True},
        set(),
    ),
    "examples_adapters_all_on_host": (
        {
            "strategy": f"zero3{ON_HOST}+params=host", "precision": "fp16", "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "max_grad_norm": 1.5, "optimizer": "adamw", "learning_rate": 2e-4,
            **LEFT_TO_ADAM, "weight_decay": 0.0, "logging_steps": 1_000_000,
        },
        set(),
    ),
    "examples_image_adam_warmup": (
        {
            "strategy": f"zero2{ON_HOST}", "precision": "fp16", "global_batch_size": 32, "max_grad_norm": 0.5,
            "optimizer": "adamw", "learning_rate": 0.002, "adam_beta1": 0.85, "adam_beta2": 0.99, "adam_epsilon": 1e-7,
            "weight_decay": 1e-6, "lr_scheduler_type": "warmup-lr", "warmup_type": "log", "warmup_steps": 300,
            "warmup_min_ratio": 0.25, "logging_steps": 250,
        },
        set(),
    ),
    "examples_image_plain": (
        {
            "strategy": "zero1", "precision": "fp16", "global_batch_size": 128, "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.0, "optimizer": "adamw", "learning_rate": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.98,
            "adam_epsilon": 1e-8, "weight_decay": 0.0, "logging_steps": 25,
        },
        set(),
    ),
    "examples_lamb_sparse_attention": (
        {
            "strategy": "ddp", "precision": "fp16", "global_batch_size": 4096, "per_device_train_batch_size": 32,
            "max_grad_norm": 1.0, "logging_steps": 10,
        },
        {"optimizer.type", "sparse_attention"},
    ),
    "examples_language_disk": (
        {
            "strategy": "zero3+optimizer=disk+grads=host+params=disk", "precision": "fp16",
            "offload": ("disk:/mnt/fast",), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
            "max_grad_norm": 0.8, "logging_steps": 1,
        },
        {"zero_optimization.stage3_param_persitance_threshold"},
    ),
    "examples_language_offload_old": (
        {
            "strategy": f"zero2{ON_HOST}", "precision": "fp16", "global_batch_size": 64,
            "gradient_accumulation_steps": 4, "max_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 2e-4,
            **LEFT_TO_ADAM, "weight_decay": 0.0, "logging_steps": 2,
        },
        set(),
    ),
    "examples_layer_routing": (
        {
            "strategy": "ddp", "precision": "fp32", "global_batch_size": 8, "per_device_train_batch_size": 4,
            "max_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 2e-4, "adam_beta1": 0.9, "adam_beta2": 0.99,
            "adam_epsilon": 1e-8, "weight_decay": 1e-7, "logging_steps": 4,
        },
        {"data_efficiency.enabled"},
    ),
    "examples_one_cycle": (
        {
            "strategy": "ddp", "precision": "fp32", "global_batch_size": 256, "per_device_train_batch_size": 16,
            "max_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 0.002, "adam_beta1": 0.9, "adam_beta2": 0.99,
            "adam_epsilon": 1e-8, "weight_decay": 1e-7, "logging_steps": 20,
        },
        {"scheduler.type"},
    ),
    "examples_questions_adam": (
        {
            "strategy": "ddp", "precision": "fp16", "global_batch_size": 48, "per_device_train_batch_size": 12,
            "max_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 2e-5, **LEFT_TO_ADAM, "weight_decay": 0.0,
            "logging_steps": 5,
        },
        {"optimizer.params.max_grad_norm", "optimizer.params.bias_correction"},
    ),
    "examples_tuned": (
        {"strategy": "ddp", "precision": "fp16", "max_grad_norm": 1.0},
        {"autotuning.enabled"},
    ),
    "hugging_face_stage2": (
        {
            "strategy": "zero2", **OPEN, "optimizer": "adamw", "lr_scheduler_type": "warmup-lr",
            "warmup_type": "log", "logging_steps": 500,
        },
        set(),
    ),
    "hugging_face_stage3": (
        {
            "strategy": f"zero3{ON_HOST}+params=host", "precision": "fp16", "export": True, "max_grad_norm": 1.0,
            "optimizer": "adamw", "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-8,
            "weight_decay": 1e-6, "lr_scheduler_type": "warmup-lr", "warmup_type": "log", "warmup_steps": 200,
            "logging_steps": 100,
        },
        set(),
    ),
    "llama_factory_long_sequences": (
        {"strategy": f"zero3{ON_HOST}", **IN_16_BITS, "logging_steps": 30},
        {"sequence_parallel.enabled"},
    ),
    "llama_factory_stage0": ({"strategy": "ddp"}, set()),
    "llama_factory_stage3_offload": (
        {"strategy": f"zero3{ON_HOST}+params=host", **OPEN, "export": True},
        set(),
    ),
    "llama_factory_tensor_parallel": (
        {"strategy": "zero2", **OPEN},
        {"tensor_parallel.autotp_size"},
    ),
    "open_instruct_stage3": (
        {
            "strategy": "zero3", **OPEN, "export": True, "optimizer": "adamw",
            "lr_scheduler_type": "warmup-decay-lr", "warmup_type": "log", "logging_steps": 50_000,
        },
        set(),
    ),
    "tutorial_mics": (
        {
            "strategy": "hsdp", **IN_16_BITS, "node_size": 4, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4, "max_grad_norm": 1.0, "report_to": ("tensorboard", "wandb"),
        },
        set(),
    ),
    "tutorial_partial_offload": (
        {
            "strategy": "zero3+optimizer=host:0.4+grads=host", **IN_16_BITS, "global_batch_size": 16,
            "max_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.95,
            "adam_epsilon": 1e-8, "weight_decay": 0.0, "lr_scheduler_type": "warmup-cosine-lr",
            "warmup_type": "linear", "warmup_steps": 50, "schedule_steps": 1000, "warmup_min_ratio": 0.01,
            "min_lr_ratio": 0.05,
        },
        set(),
    ),
    "tutorial_zero_plus_plus": (
        {
            "strategy": "hpz+params_as=int8+grads_as=int4", "precision": "bf16", "reduce_dtype": "fp32",
            "skip_nonfinite": True, "node_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
            "max_grad_norm": 1.0,
        },
        set(),
    ),
}  # fmt: skip
