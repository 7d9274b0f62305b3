"""MiniLLM (arXiv 2306.08543) on arithmetic: the reverse KL of whole completions to the teacher of
arithmetic_gkd."""

from dataclasses import replace

from launch.presets import arithmetic_gkd
from tpu_rl.algos import MiniLlmConfig

CONFIG = replace(arithmetic_gkd.CONFIG, algorithm=MiniLlmConfig(teacher=arithmetic_gkd.TEACHER))
