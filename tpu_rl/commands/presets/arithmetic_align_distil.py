"""AlignDistil (arXiv 2503.02832) on arithmetic.

The shipped model learns, token by token, from a DPO model pushed away from its opposite. The more
the two models disagree, the further the target goes. Train both first:

    python launch/run.py arithmetic_dpo
    python launch/run.py arithmetic_dpo --algorithm.reverse --run-dir runs/arithmetic_dpo_reverse
    python launch/run.py arithmetic_align_distil

Flags for the other arms:

    --algorithm.no-adaptive                                      a constant alpha of 1
    --algorithm.no-adaptive --algorithm.target extrapolated --algorithm.alpha 2
                                                                 theorem 1: no reverse model
    --algorithm.no-tvd-half                                      the authors' code: twice the alpha
    --algorithm.beta0 None                                       all tokens weigh the same
    --algorithm.on-policy 0                                      off policy

beta0 is a third of the teachers' beta. It scales the whole loss, which hardly matters with Adam.
"""

from dataclasses import replace

from tpu_rl.algos import DistillConfig
from tpu_rl.commands.presets import arithmetic_gkd

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
