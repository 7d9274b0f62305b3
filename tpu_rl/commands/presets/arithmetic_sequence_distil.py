"""Sequence-level distillation on arithmetic: the shipped model imitates samples of the teacher of
arithmetic_gkd."""

from dataclasses import replace

from tpu_rl.algos import SftConfig
from tpu_rl.commands.presets import arithmetic_gkd

CONFIG = replace(arithmetic_gkd.CONFIG, algorithm=SftConfig(teacher=arithmetic_gkd.TEACHER))
