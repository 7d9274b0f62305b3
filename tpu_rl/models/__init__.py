"""Language models: `load` one, make a `policy` or a `role` of it, `save` it."""

from tpu_rl.models.decoder import DecoderConfig, decoder
from tpu_rl.models.hf_weights import find_directory, from_config, load, save
from tpu_rl.models.roles import apply, policy, role

__all__ = ["DecoderConfig", "apply", "decoder", "find_directory", "from_config", "load", "policy", "role", "save"]
