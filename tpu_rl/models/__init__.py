"""Language models: load one, derive others from it, and save it.

`load` reads a Hugging Face directory. `policy` and `role` are how the sampler and algorithms use a
model. `variant`, `first_layers`, `with_lora` and the other `with_...` functions return derived
models.
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.models.config import DecoderConfig, LoraConfig, matrix_axes
    from tpu_rl.models.decoder import axes, cast_to_compute_dtype, decoder
    from tpu_rl.models.heads import (
        first_layers,
        first_layers_params,
        head_params,
        head_role,
        random_head,
        require_writer,
    )
    from tpu_rl.models.hf.checkpoint import check, file_dtype, from_config, load, save
    from tpu_rl.models.hf.paths import find_configuration, find_directory
    from tpu_rl.models.hf.peft import (
        base_directory,
        is_adapter,
        load_adapters,
        save_adapters,
        tokenizer_directory,
    )
    from tpu_rl.models.lora import join, merge, random_adapters, split, with_lora
    from tpu_rl.models.moe.router import probe
    from tpu_rl.models.policy import (
        Select,
        apply,
        image_features,
        policy,
        role,
        variant,
        with_attention_kernel,
        with_exact_sampling,
        with_int8_cache,
        with_unsampled,
    )
    from tpu_rl.models.quantization import quantize_tree
    from tpu_rl.models.vision.config import UNTRAINED

lazy.exports(__name__, __file__)
