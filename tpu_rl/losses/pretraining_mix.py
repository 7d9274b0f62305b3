"""The pretraining mix of PPO-ptx: texts that the policy goes on imitating while it learns.

    loss  =  the method's  -  pretraining_coef mean_t log p(x_t)  (InstructGPT, arXiv 2203.02155)

The mean is over the learned tokens of the optimizer step's texts. One text joins each group as a
row of `RowSource.TEXT`; no baseline, reward or metric of the policy reads it.

Deviation: log-probs are at the sampling temperature, as those of the policy's own tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Part, PolicyBatch, actions_of, weighted_term
from tpu_rl.ranges import Needs, NotNegative
from tpu_rl.types import Array, Layout, Rollout, RowSource


@dataclass(frozen=True, kw_only=True)
class PretrainingMix(ranges.Checked):
    """Settings of every method that can go on imitating texts."""

    pretraining_path: Annotated[str | None, Needs("pretraining_coef")] = None
    """File of texts, or of rows for SFT, that the policy goes on imitating: one for each prompt of
    a step, in an order of its own (PPO-ptx)."""
    pretraining_coef: Annotated[NotNegative, Needs("pretraining_path")] = 0.0
    """Coefficient of the texts' negative log-likelihood per token."""

    def with_texts(self, spec: ExperienceSpec) -> ExperienceSpec:
        """Add a text to each group, if there is a file of them."""
        if self.pretraining_path is None:
            return spec
        return spec._replace(texts=self.pretraining_path, rows_added=spec.rows_added + 1)

    def text_parts(self) -> tuple[Part, ...]:
        """List the part, if it is on."""
        return (text_mix(self.pretraining_coef),) if self.pretraining_coef else ()


def text_mix(coef: float) -> Part:
    """Make the part "pretraining", which goes on imitating texts."""

    def weights(rollout: Rollout, layout: Layout) -> Array:
        learned = actions_of(rollout, RowSource.TEXT)
        mean = masked.token_mean(learned, layout.minibatch, layout.minibatches)
        return coef * mean

    def losses(log_probs: Array, batch: PolicyBatch) -> Array:
        return -log_probs

    return weighted_term("pretraining", weights, losses)
