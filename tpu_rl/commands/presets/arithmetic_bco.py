"""BCO on the shipped model's own completions, each judged right or wrong by itself: arithmetic_dpo
without pairs.

Use `--algorithm.loss kto` or `apo_zero` for its relatives. KTO improves the greedy completions but
not the sampled ones (docs/benchmarks/preferences.md): it pushes wrong completions so far away that
right ones lose likelihood, too.
"""

from dataclasses import replace

from tpu_rl.algos import KtoConfig
from tpu_rl.commands.presets import arithmetic_dpo

CONFIG = replace(
    arithmetic_dpo.CONFIG,
    algorithm=KtoConfig(loss="bco", beta=0.3, pairs="reference"),
    batch=replace(arithmetic_dpo.CONFIG.batch, prompts=32),
    evaluation=replace(arithmetic_dpo.CONFIG.evaluation, rows=1000, interval=40),
    steps=160,
)
