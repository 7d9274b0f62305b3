"""Language models: load one, derive others from it, and save it.

`load` reads a Hugging Face directory. `policy` and `role` are how the sampler and algorithms use a
model. `with_head`, `first_layers`, `with_lora` and the other `with_...` functions return derived
models.
"""

from tpu_rl.models.config import DecoderConfig as DecoderConfig
from tpu_rl.models.config import LoraConfig as LoraConfig
from tpu_rl.models.config import matrix_axes as matrix_axes
from tpu_rl.models.decoder import axes as axes
from tpu_rl.models.decoder import cast_to_compute_dtype as cast_to_compute_dtype
from tpu_rl.models.decoder import decoder as decoder
from tpu_rl.models.heads import first_layers as first_layers
from tpu_rl.models.heads import first_layers_params as first_layers_params
from tpu_rl.models.heads import head_params as head_params
from tpu_rl.models.heads import head_role as head_role
from tpu_rl.models.heads import random_head as random_head
from tpu_rl.models.heads import with_head as with_head
from tpu_rl.models.hf.checkpoint import check as check
from tpu_rl.models.hf.checkpoint import file_dtype as file_dtype
from tpu_rl.models.hf.checkpoint import from_config as from_config
from tpu_rl.models.hf.checkpoint import load as load
from tpu_rl.models.hf.checkpoint import save as save
from tpu_rl.models.hf.paths import find_configuration as find_configuration
from tpu_rl.models.hf.paths import find_directory as find_directory
from tpu_rl.models.hf.peft import base_directory as base_directory
from tpu_rl.models.hf.peft import is_adapter as is_adapter
from tpu_rl.models.hf.peft import load_adapters as load_adapters
from tpu_rl.models.hf.peft import save_adapters as save_adapters
from tpu_rl.models.hf.peft import tokenizer_directory as tokenizer_directory
from tpu_rl.models.lora import join as join
from tpu_rl.models.lora import merge as merge
from tpu_rl.models.lora import random_adapters as random_adapters
from tpu_rl.models.lora import split as split
from tpu_rl.models.lora import with_lora as with_lora
from tpu_rl.models.moe.router import probe as probe
from tpu_rl.models.policy import Select as Select
from tpu_rl.models.policy import apply as apply
from tpu_rl.models.policy import image_features as image_features
from tpu_rl.models.policy import policy as policy
from tpu_rl.models.policy import role as role
from tpu_rl.models.policy import with_attention_kernel as with_attention_kernel
from tpu_rl.models.policy import with_cpu_cache as with_cpu_cache
from tpu_rl.models.policy import with_exact_sampling as with_exact_sampling
from tpu_rl.models.policy import with_float32_sums as with_float32_sums
from tpu_rl.models.policy import with_gpu_decode as with_gpu_decode
from tpu_rl.models.policy import with_int8_cache as with_int8_cache
from tpu_rl.models.policy import with_quantized_weights as with_quantized_weights
from tpu_rl.models.policy import with_recorded_routing as with_recorded_routing
from tpu_rl.models.policy import with_remat as with_remat
from tpu_rl.models.policy import with_unsampled as with_unsampled
from tpu_rl.models.quantization import quantize_tree as quantize_tree
from tpu_rl.models.vision.config import UNTRAINED as UNTRAINED
