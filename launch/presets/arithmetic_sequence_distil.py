"""Sequence-level distillation of arithmetic: the shipped model imitates what the teacher of arithmetic_gkd samples."""

from dataclasses import replace

from launch.presets import arithmetic_gkd
from tpu_rl.algos import SftConfig

CONFIG = replace(arithmetic_gkd.CONFIG, algorithm=SftConfig(teacher=arithmetic_gkd.TEACHER))
