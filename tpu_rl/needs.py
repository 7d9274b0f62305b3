"""What an algorithm's configuration says of its needs: `needs`, the experience, and `roles`, the models by name."""

from __future__ import annotations

from typing import NamedTuple

from tpu_rl.types import Pairs


class RoleSpec(NamedTuple):
    """How the params of a role come to be. Unless told otherwise it starts as the model of --model.path."""

    trainable: bool
    path: str | None = None
    """Another model to start as: a directory, hub id or the model folder of a run."""
    random: bool = False
    """Only the architecture is taken over; weights are random."""
    layers: int | None = None
    """Only the first so many layers are taken over."""
    outputs: int | None = None
    """A head of so many numbers in place of the vocabulary (a value, a reward, a distribution)."""
    outputs_per_token: int | None = None
    """A head of so many numbers for each token that may follow, [V x outputs_per_token] in the vocabulary's order."""
    trunk_of: str | None = None
    """A head only, on the hidden states of that role: whoever calls it computes those once."""
    follows: float = 0.0
    """The algorithm moves it by this share towards the role that trains, now and then; 1 makes it the same."""
    learning_rate_scale: float = 1.0
    """Times the run's learning rate. Each trainable role has its gradients clipped on its own."""


class PromptValue(NamedTuple):
    """What a prompt is worth: beta ln mean exp(reward / beta) over completions of it, which are sampled for that alone
    (`advantages.optimal_value`). `Rollout.baseline` holds it."""

    role: str
    """Whose model completes it."""
    samples: int
    beta: float
    """In units of reward a nat; of one sample the value is its reward, whatever beta."""
    greedy: bool = False
    """The most likely tokens, in place of the run's sampling temperature."""


class Needs(NamedTuple):
    """What an algorithm learns from. By it the launcher chooses where a stage's experience comes from."""

    experience: type
    """Rollout, Demonstrations, Completions, Pairs or QExamples."""
    columns: tuple[str, ...] = ("prompt",)
    """Of a data row. ("messages",): a conversation, or else a prompt with its completion."""
    sampled_by: str | None = "policy"
    """The role that completes the prompts; None: the data bring completions."""
    on_policy: float = 0.0
    """Completions: the share of the prompts that the policy completes, `sampled_by` completing the others."""
    latest_policy: bool = False
    """Completions that an earlier policy drew would be learned from wrongly."""
    smallest_group: int = 1
    """Completions of a prompt, where they are compared with each other."""
    prompt_value: PromptValue | None = None
    """Rollout: with what each prompt is worth."""
    judged: bool = False
    """Pairs: completions judged one by one, in place of pairs."""
    reference_log_probs: bool = False
    """Pairs: with the reference's log-probs, of pairs that the data bring computed once, and else the sampler's."""

    def shares(self, prompts: int) -> dict[str, int]:
        """Role -> how many of so many prompts it completes; the rest the data bring completed."""
        own = round(self.on_policy * prompts)
        by = {"policy": own} | ({} if self.sampled_by is None else {self.sampled_by: prompts - own})
        return {role: count for role, count in by.items() if count}


def pairs_from(by: str, *, judged: bool = False, reference_log_probs: bool = False) -> Needs:
    """Pairs, or completions judged one by one, that the data bring ("given") or that the role `by` samples."""
    if by != "given":
        needs = Needs(Pairs, sampled_by=by, smallest_group=1 if judged else 2)
    else:
        columns = ("prompt", "completion", "label") if judged else ("prompt", "chosen", "rejected")
        needs = Needs(Pairs, columns, None)
    return needs._replace(judged=judged, reference_log_probs=reference_log_probs)
