"""R1-Searcher's second stage (arXiv 2503.05592): the model of search_calls learns to answer.

The reward is 1 for the right answer, and 1 for an answer at the end of the episode. The control, an
index that finds facts at random: --environment search_random.
"""

from dataclasses import replace

from tpu_rl.commands.config import ModelConfig
from tpu_rl.commands.presets import search_calls

CONFIG = replace(
    search_calls.CONFIG,
    model=ModelConfig(path="runs/search_calls/model", remat="none"),
    reward=("search_answer", "search_format"),
    evaluation=replace(
        search_calls.CONFIG.evaluation, reward="search_answer", metrics=("search_called",)
    ),
    steps=40,
)
