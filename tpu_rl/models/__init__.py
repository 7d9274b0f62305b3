"""Language models: `load` one, make a `policy` or a `role` of it, give it a head, `save` it."""

from tpu_rl.models.decoder import DecoderConfig, decoder
from tpu_rl.models.heads import first_layers, first_layers_params, head_params, head_role, random_head, with_head
from tpu_rl.models.hf_weights import check, find_directory, from_config, load, save
from tpu_rl.models.roles import apply, policy, role

__all__ = [
    "DecoderConfig",
    "apply",
    "check",
    "decoder",
    "find_directory",
    "first_layers",
    "first_layers_params",
    "from_config",
    "head_params",
    "head_role",
    "load",
    "policy",
    "random_head",
    "role",
    "save",
    "with_head",
]
