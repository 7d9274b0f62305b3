"""gsm8k_grpo with adapters over frozen bfloat16 weights, sized for one chip with 16 GiB, as in
Colab. By the plan, Gemma-2-2B takes at most 10.8 GiB of a v5e.

    python launch/run.py gsm8k_lora --model.path DIR --data.path train.jsonl
    python launch/plan.py gsm8k_lora --model.path Gemma-2-2B --topology v5e:1x1
"""

from dataclasses import replace

from tpu_rl.commands.presets import gsm8k_grpo
from tpu_rl.models import LoraConfig

BASE = gsm8k_grpo.CONFIG

CONFIG = replace(
    BASE,
    model=replace(BASE.model, param_dtype="bfloat16", lora=LoraConfig(rank=16)),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, micro_batch_rows=1),
    sampling=replace(BASE.sampling, max_num_seqs=32),
)
