"""Language models: `load` one, make a `policy` or a `role` of it, `save` it."""

from tpu_rl.models.decoder import DecoderConfig, decoder
from tpu_rl.models.hf_weights import from_config
from tpu_rl.models.roles import apply, policy, role

__all__ = ["DecoderConfig", "apply", "decoder", "from_config", "policy", "role"]
