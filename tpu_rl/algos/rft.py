"""Rejection-sampling fine-tuning: imitate the sampled completions that a reward accepts.

    accepted(x) = completions y of x with r(x, y) >= min_reward, or the best of x
    loss        = -sum_t w_t log policy(y_t | x, y_<t),    w_t = 1 / accepted tokens of the step

Duplicates among a prompt's completions count once. The loss is that of `sft`. If the policy
samples, rewards are 0 and 1, and there are no duplicates, the gradient is that of REINFORCE without
a baseline, divided by the number of accepted tokens, if the sampling temperature is 1: the loss is
at temperature 1 whatever that is.

    RFT                 sampled_by "reference": the first model samples     arXiv 2308.01825
    expert iteration    sampled_by "reference" and round_steps: a round     arXiv 1705.08439
                        imitates the policy of the round before
                        (STaR, ReST, ReST-EM                    arXiv 2203.14465, 2308.08998,
                                                                2312.06585)
    RAFT                keep "best", sampled_by "policy"                    arXiv 2304.06767
    SuperHF             RAFT + kl_coef sum_t w_t KL(first policy || policy)  arXiv 2310.16763
    a stronger model    sampled_by "teacher"

Deviations: the papers sample a data set first and then train on it, for several epochs. Here every
step samples for its own prompts, and uses them `--batch.ppo-epochs` times. The policy continues
from round to round, while STaR and ReST-EM restart from the first model. RFT tells completions
apart by their equations; here two completions are the same if all their tokens are. STaR's
rationalization (hints for problems that were not solved) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tpu_rl import ranges
from tpu_rl.algorithm_spec import Acceptance, ExperienceSpec, RoleSpec
from tpu_rl.algos.roles import with_reference
from tpu_rl.algos.sft import SftConfig, sft
from tpu_rl.losses.controllers import moving_reference
from tpu_rl.ranges import Conflicts, Count, CountOrNone, Needs, NotNegative, ReadOnlyWith
from tpu_rl.types import Algorithm, Roles, Sampling


@dataclass(frozen=True)
class RftConfig(ranges.Checked):
    """By default the policy itself samples, and learns from all completions that pass."""

    sampled_by: Annotated[
        Literal["policy", "reference", "teacher"], Needs("teacher", when="teacher")
    ] = "policy"
    """The model that completes the prompts: the policy as it is, the model that the run (or, with
    `round_steps`, the round) began with, or `teacher`."""
    teacher: Annotated[
        str | None, ReadOnlyWith("sampled_by", "teacher", why="it does not sample")
    ] = None
    """A model with the policy's tokenizer: a directory, a hub id or the model folder of a run."""
    keep: Annotated[
        Literal["passing", "best"],
        Needs("max_per_prompt", when="best", why="it says how many of the best completions count"),
    ] = "passing"
    """passing: completions whose reward is at least `min_reward`. best: the `max_per_prompt` best
    completions of each prompt, whatever their rewards are."""
    min_reward: float = 0.5
    """The smallest reward of a completion that passes."""
    max_per_prompt: Count | None = None
    """The largest number of different completions of a prompt to learn from, the best ones. If not
    given, learn from all."""
    round_steps: Annotated[
        CountOrNone, ReadOnlyWith("sampled_by", "reference", why="rounds move the reference")
    ] = 0
    """Expert iteration: the reference is set to the policy every so many optimizer steps. 0 never
    moves it."""
    kl_coef: Annotated[
        NotNegative, Conflicts("round_steps", why="the KL is to the policy before training")
    ] = 0.0
    """Coefficient of the KL, in nats per token, from the policy before training."""

    @property
    def experience(self) -> ExperienceSpec:
        acceptance = Acceptance(self.keep, self.min_reward, self.max_per_prompt)
        return ExperienceSpec("accepted", sampled_by=self.sampled_by, acceptance=acceptance)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = {"policy": RoleSpec(trainable=True)}
        needed = self.sampled_by == "reference" or self.kl_coef > 0
        roles = with_reference(roles, needed, tracks_policy=1.0 if self.round_steps else 0.0)
        if self.sampled_by == "teacher":
            roles["teacher"] = RoleSpec(trainable=False, path=self.teacher)
        return roles


def rft(config: RftConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build RFT. It learns from the Completions that were accepted; the mask of others is empty.

    Its state counts the updates if the reference moves.
    """
    algorithm = sft(SftConfig(kl_coef=config.kl_coef), roles, sampling)
    if not config.round_steps:
        return algorithm
    init_state, after_update = moving_reference(config.round_steps)
    return algorithm._replace(init_state=init_state, after_update=after_update)
