"""AlignDistil (arXiv 2503.02832) of arithmetic: the shipped model learns, token by token, from a DPO model pushed away
from its opposite, the further the more the two disagree. Train both first; other arms by flags:

    python launch/run.py arithmetic_dpo
    python launch/run.py arithmetic_dpo --algorithm.reverse --run-dir runs/arithmetic_dpo_reverse
    python launch/run.py arithmetic_align_distil
        --algorithm.no-adaptive                                       a constant alpha, of 1
        --algorithm.no-adaptive --algorithm.target extrapolated --algorithm.alpha 2      theorem 1: no reverse model
        --algorithm.no-tvd-half                                       the authors' code: twice the alpha
        --algorithm.beta0 None                                        every token weighs the same
        --algorithm.on-policy 0                                       off policy

beta0 is a third of the teachers' beta: it scales the whole loss, of which Adam notices little.
"""

from dataclasses import replace

from launch.presets import arithmetic_gkd
from tpu_rl.algos import DistillConfig

CONFIG = replace(
    arithmetic_gkd.CONFIG,
    algorithm=DistillConfig(
        teacher="runs/arithmetic_dpo/model",
        teacher_reverse="runs/arithmetic_dpo_reverse/model",
        target="contrastive",
        alpha=1.0,
        adaptive=True,
        beta0=0.1,
    ),
)
