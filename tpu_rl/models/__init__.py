"""Language models: `load` one, make a `policy` or a `role` of it, give it a head or adapters,
`save` it."""

from tpu_rl.models.architecture import DecoderConfig, LoraConfig
from tpu_rl.models.decoder import axes, decoder, narrow
from tpu_rl.models.directories import find_configuration, find_directory
from tpu_rl.models.heads import first_layers, first_layers_params, head_params, head_role, random_head, with_head
from tpu_rl.models.hf_weights import check, from_config, load, save
from tpu_rl.models.lora import join, merge, random_adapters, split, with_lora
from tpu_rl.models.peft_files import base_directory, is_adapter, load_adapters, save_adapters, tokenizer_directory
from tpu_rl.models.roles import (
    apply,
    policy,
    role,
    with_attention_kernel,
    with_cache_for_cpus,
    with_int8_cache,
    with_remat,
)
from tpu_rl.models.routers import probe

__all__ = [
    "DecoderConfig",
    "LoraConfig",
    "apply",
    "axes",
    "base_directory",
    "check",
    "decoder",
    "find_configuration",
    "find_directory",
    "first_layers",
    "first_layers_params",
    "from_config",
    "head_params",
    "head_role",
    "is_adapter",
    "join",
    "load",
    "load_adapters",
    "merge",
    "narrow",
    "policy",
    "probe",
    "random_adapters",
    "random_head",
    "role",
    "save",
    "save_adapters",
    "split",
    "tokenizer_directory",
    "with_attention_kernel",
    "with_head",
    "with_int8_cache",
    "with_lora",
    "with_remat",
    "with_cache_for_cpus",
]
