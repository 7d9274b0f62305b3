"""Sequence-level distillation on arithmetic: the shipped model imitates samples of the teacher of
arithmetic_gkd."""

from dataclasses import replace

from launch.presets import arithmetic_gkd
from tpu_rl.algos import SftConfig

CONFIG = replace(arithmetic_gkd.CONFIG, algorithm=SftConfig(teacher=arithmetic_gkd.TEACHER))
