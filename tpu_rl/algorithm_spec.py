"""The declarations of an algorithm's configuration: its experience and its roles.

A configuration is a frozen dataclass with two properties: `experience`, an ExperienceSpec, says
what data the algorithm learns from; `roles`, RoleSpecs by name, says which models it uses. The
launcher reads these two instead of the type of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tpu_rl.types import Completions, Demonstrations, Pairs, QExamples, Rollout, ScoredCompletions


@dataclass(frozen=True)
class ScoreReadout:
    """The way to read the score of a completion from the outputs of a reward model.

    Saved with the model (`rewards.reward_model`), so that scores are read the same way in training
    and in use.
    """

    kind: Literal["last", "sentences", "steps"] = "last"
    """Place to read: the last token, or the ends of sentences or of steps (see
    `reward_score.sentence_scores` and `reward_score.step_scores`)."""
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a sentence or a step."""
    aggregate: str = ""
    """Way to combine the scores of sentences ("attention", "sum") or steps ("min", "product",
    "mean")."""
    penalty: float = 0.0
    """Multiple of the standard deviation over an ensemble's members that is subtracted from their
    mean."""
    worst_share: float = 0.0
    """Share of the smallest member in the score, in place of the mean."""
    deviations: bool = False
    """Each head has two outputs, a mean and a deviation of its own."""


class RoleSpec(NamedTuple):
    """The origin of a role's params. By default it starts as the model of --model.path."""

    trainable: bool
    path: str | None = None
    """Start as another model: a directory, a hub id or the model folder of a run."""
    random: bool = False
    """Take over the architecture only; weights are random."""
    layers: int | None = None
    """Take over this many first layers only."""
    outputs: int | None = None
    """Replace the vocabulary by a head with this many outputs (a value, a reward, a distribution).
    """
    outputs_per_token: int | None = None
    """Replace the vocabulary by a head with this many outputs for each token that may follow,
    [V x outputs_per_token] in the order of the vocabulary."""
    trunk_of: str | None = None
    """A head only, on the hidden states of this role. The caller computes them once for both."""
    tracks_policy: float = 0.0
    """Share by which the algorithm moves the role towards the role that trains, now and then; 1
    makes them equal."""
    learning_rate_scale: float = 1.0
    """Multiple of the run's learning rate. The gradients of each trainable role are clipped
    separately."""
    reading: ScoreReadout | None = None
    """The role is a reward model whose scores are read like this; None for any other role."""


class PromptValue(NamedTuple):
    """The value of a prompt: beta log mean exp(reward / beta) over completions that are sampled for
    this alone (`advantages.optimal_value`). `Rollout.baseline` holds it."""

    role: str
    """The role that completes the prompt."""
    samples: int
    """Completions per prompt."""
    beta: float
    """In units of reward per nat. With one sample the value is its reward, whatever beta is."""
    greedy: bool = False
    """Take the most likely tokens instead of sampling at the run's temperature."""


class Opponent(NamedTuple):
    """Another sampler of each prompt, with whose completions the policy's are compared one by one:
    the geometric mixture of policy and reference (`sampler.derived_policies`)."""

    reference_share: float
    """Share of the reference; 1 is the reference itself, and 0 the policy."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that it samples from."""
        if self.reference_share == 1:
            return ("reference",)
        return ("policy", "reference") if self.reference_share else ("policy",)


class Hint(NamedTuple):
    """A text that a teacher sees in the prompt and the policy does not. `Rollout.rewards` holds the
    log-ratio of the two at each token (`experience.hints`)."""

    role: str
    """The role of the teacher."""
    column: str
    """Column of the data rows that holds the hint."""
    template: str
    """The teacher's prompt, with {prompt} and {hint}."""


class Nucleus(NamedTuple):
    """The policy samples in the top-p nucleus of the role "mask", an older copy of itself
    (`losses.nucleus`)."""

    top_p: float
    every: int
    """Updates after which the role is set to the policy again."""


class Replay(NamedTuple):
    """Successes of the past for groups that have none now (`experience.replay`)."""

    size: int
    """Prompts whose latest success is kept."""
    min_reward: float
    """A completion with at least this reward is a success."""


class Refinement(NamedTuple):
    """A critique of the worst completion of a group, after which the policy writes another
    (`experience.refinements`)."""

    critique: str
    """The text after the completion; {answer} in it stands for the column's text."""
    column: str


class Acceptance(NamedTuple):
    """The rule by which sampled completions are accepted. Equal ones of a prompt count once."""

    keep: Literal["passing", "best"]
    """passing: those whose reward is at least `min_reward`. best: all that have a reward."""
    min_reward: float
    max_per_prompt: int | None
    """Accept at most so many completions of a prompt, the best ones; None: all."""


SourceName = Literal[
    "rollouts",
    "accepted",
    "demonstrations",
    "completions",
    "pairs",
    "q_examples",
    "step_labels",
    "scored_completions",
]

KINDS: dict[SourceName, type] = {
    "rollouts": Rollout,
    "accepted": Completions,
    "demonstrations": Demonstrations,
    "completions": Completions,
    "pairs": Pairs,
    "q_examples": QExamples,
    "step_labels": QExamples,
    "scored_completions": ScoredCompletions,
}
"""Source -> the type of its experience."""


class ExperienceSpec(NamedTuple):
    """The experience that an algorithm learns from, and its origin."""

    source: SourceName
    """rollouts: scored completions of the policy. accepted: completions of a role that their
    rewards select. demonstrations: texts of the data. completions: texts of the policy, of another
    role or of the data, without scores. pairs: compared or graded completions. q_examples: returns
    of continuations by the reference, collected in rounds before the steps that learn from them.
    step_labels: labels of the steps of a completion. scored_completions: several completions of
    each prompt with scores."""
    columns: tuple[str, ...] = ("prompt",)
    """Columns that a data row must have. ("messages",) stands for a conversation, or for a prompt
    with its completion."""
    sampled_by: str | None = "policy"
    """The role that completes the prompts; None if the data bring completions."""
    policy: Literal["plain", "guided"] = "plain"
    """The policy that is evaluated: the role "policy" by itself, or guided by the role "q"."""
    on_policy: float = 0.0
    """completions: share of the prompts that the policy completes. `sampled_by` completes the
    others."""
    latest_policy: bool = False
    """The loss is wrong for completions that an earlier policy sampled."""
    smallest_group: int = 1
    """Smallest number of completions per prompt; 2 if they are compared with each other."""
    compared: int | None = None
    """scored_completions: the most completions of a prompt, which are compared with each other, so
    that there are two at least; None if there may be one."""
    positive_temperature: bool = False
    """The loss divides logits by the sampling temperature, so it must be above 0. That is always so
    for a policy that trains on rollouts."""
    prompt_value: PromptValue | None = None
    """rollouts: value of each prompt that the algorithm needs."""
    opponent: Opponent | None = None
    """pairs: it samples the second completion of each pair, whose rows are the policy's and its
    own. rollouts: the reward of a completion becomes its chance to win less 1/2."""
    adapts_temperature: bool = False
    """rollouts: the algorithm's state has a factor of the sampling temperature
    (`controllers.temperature_factor`)."""
    nucleus: Nucleus | None = None
    """rollouts: the policy samples among the likely tokens of another role."""
    acceptance: Acceptance | None = None
    """accepted: which completions are learned from."""
    graded: bool = False
    """pairs: completions that are judged one by one, instead of pairs."""
    served: tuple[str, int] | None = None
    """A teacher by HTTP: its address, and the number of likeliest tokens that it tells."""
    imitates: str | None = None
    """Author of the texts that the policy learns to write: "data", or a role. Evaluations report
    their loss on held-out rows."""
    reference_log_probs: bool = False
    """pairs: the log-probs of the reference are part of them. For pairs of the data they are
    computed once; for sampled pairs they are the sampler's."""
    transforms: Callable[[Any], Sequence[Any]] | None = None
    """rollouts: tokenizer -> transforms of each batch (`experience.transforms.Transform`)."""
    raw_returns: bool = False
    """rollouts: the loss reads returns on their own scale: a threshold, a clip, or their sign."""
    hint: Hint | None = None
    """rollouts: the teacher whose log-ratios are the rewards of tokens."""
    expert_column: str | None = None
    """rollouts: column whose text joins each group as a row of `RowSource.EXPERT`."""
    replay: Replay | None = None
    """rollouts: successes of the past that join each group as a row of `RowSource.REPLAY`."""
    refinement: Refinement | None = None
    """rollouts: a refined completion joins each group as a row of `RowSource.EXPERT`."""
    texts: str | None = None
    """rollouts: file of texts, one of which joins each group as a row of `RowSource.TEXT`."""
    rows_added: int = 0
    """rollouts: rows that the transforms add to each group."""

    @property
    def kind(self) -> type:
        """Type of the experience, one of `KINDS`."""
        return KINDS[self.source]

    def shares(self, prompts: int) -> dict[str, int]:
        """Share the `prompts` prompts out: role -> number of those that it completes.

        Roles that complete none are left out. The data bring completions of the other prompts.
        """
        by_policy = round(self.on_policy * prompts)
        counts = {"policy": by_policy}
        if self.sampled_by is not None and by_policy < prompts:
            counts[self.sampled_by] = prompts - by_policy
        return {role: count for role, count in counts.items() if count}


def scores_of_data(compared: int | None = None) -> ExperienceSpec:
    """Make the spec of completions with scores that the data bring.

    Args:
      compared: the most completions of a prompt that are compared; None if they are not.
    """
    columns = ("prompt", "completions", "scores")
    return ExperienceSpec("scored_completions", columns, sampled_by=None, compared=compared)


def pairs_from(
    source: str, *, graded: bool = False, reference_log_probs: bool = False
) -> ExperienceSpec:
    """Make the spec of pairs that the data bring ("given") or that a role samples.

    Args:
      source: "given", or the name of the role.
      graded: whether completions are judged one by one, instead of pairs.
      reference_log_probs: whether the log-probs of the reference are needed.
    """
    spec = ExperienceSpec("pairs", graded=graded, reference_log_probs=reference_log_probs)
    if source != "given":
        return spec._replace(sampled_by=source, smallest_group=1 if graded else 2)
    columns = ("prompt", "completion", "label") if graded else ("prompt", "chosen", "rejected")
    return spec._replace(columns=columns, sampled_by=None)
