"""MiniLLM (arXiv 2306.08543) on arithmetic: the reverse KL of whole completions to the teacher of
arithmetic_gkd."""

from dataclasses import replace

from tpu_rl.algos import MiniLlmConfig
from tpu_rl.commands.presets import arithmetic_gkd

CONFIG = replace(arithmetic_gkd.CONFIG, algorithm=MiniLlmConfig(teacher=arithmetic_gkd.TEACHER))
