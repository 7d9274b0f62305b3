"""The model of the search presets: a small model learns from scratch to search and to answer, from
a careless user, who guesses in every other case.

It learns what the index finds too, which is part of the demonstrations. The evaluation lets it use
the index.
"""

from dataclasses import replace

from tpu_rl.commands.config import ModelConfig
from tpu_rl.commands.presets import mini_shell_sft
from tpu_rl.environments import SearchData
from tpu_rl.environments.search import MAX_SEARCHES

BASE = mini_shell_sft.CONFIG

CONFIG = replace(
    BASE,
    data=SearchData(),
    environment="search",
    reward=("search_answer", "search_called", "search_format"),
    model=ModelConfig(path="builtin:search", random_init=True, remat="none"),
    batch=replace(BASE.batch, row_length=128),
    sampling=replace(
        BASE.sampling,
        max_prompt_tokens=16,
        max_new_tokens=64,
        max_turns=MAX_SEARCHES + 1,
        max_observation_tokens=16,
    ),
    evaluation=replace(BASE.evaluation, interval=100),
    steps=400,
)
