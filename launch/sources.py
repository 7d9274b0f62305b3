"""Where a stage's experience comes from: completions of the data's prompts, or texts that the data bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from launch import dataset, preemption, roles, watchdog
from launch.acting import Acting, acting
from launch.config import ExperimentConfig, Stage
from launch.roles import Language, Select
from tpu_rl import advantages, data, models, packing, reward_models, rewards, rollouts, sampler, sandbox, sharding
from tpu_rl.models import flash_attention
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import (
    Completions,
    Demonstrations,
    Experience,
    Layout,
    Model,
    Pairs,
    Params,
    Policy,
    Purpose,
    Role,
    Rollout,
    TrainState,
)


class Setup(NamedTuple):
    """What all stages of a run share."""

    config: ExperimentConfig
    language: Language
    models: dict[str, Model]
    """The model of each role."""
    mesh: Mesh
    run_dir: Path

    def params_of(self, role: str) -> Select:
        """What takes a role's params out of the whole tree."""
        return roles.place(self.config, role)

    def policy(self, role: str) -> Policy:
        """How the role continues sequences, its cache as the run's settings want it."""
        model = self.models[role]
        if self.config.sampling.cache == "int8":
            model = models.with_int8_cache(model)
        return models.policy(model, self.params_of(role))

    def acting(self, role: str) -> Acting:
        """The role as it answers, with what drafts for it."""
        names = [role, *filter(None, [self.drafter])]
        return acting(self.config, self.policy(role), map(self.params_of, names), self.mesh)

    @property
    def drafter(self) -> str | None:
        """The role of the small model that drafts; None where there is none."""
        return roles.DRAFT if self.config.sampling.speculation.model else None

    def role(self, role: str) -> Role:
        return models.role(self.models[role], self.params_of(role))


class Drawn(NamedTuple):
    """One batch of experience, with its part of the metrics row and of samples.jsonl."""

    data: Any
    """Rollout, Demonstrations, Completions, Pairs or QExamples."""
    metrics: dict[str, float]
    records: list[dict[str, Any]]
    warnings: list[str]
    """What people should read at once: reward functions that failed, with name and row."""


class Source(NamedTuple):
    """Experience, step by step. Its state is JSON values and goes into checkpoints."""

    draw: Callable[[int, TrainState], Drawn]
    """(step of the run, state) -> experience. Offline sources ignore the state."""
    get_state: Callable[[], dict[str, Any]]
    set_state: Callable[[dict[str, Any]], None]
    close: Callable[[], None] = lambda: None
    """Nobody will draw any more."""


def sampler_config(config: ExperimentConfig, tokenizer: Tokenizer, samples_per_prompt: int) -> sampler.SamplerConfig:
    how = config.sampling
    return sampler.SamplerConfig(
        max_new_tokens=how.max_new_tokens,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        repetition_penalty=how.repetition_penalty,
        logit_bias=how.logit_bias,
        stop_ids=tokenizer.eos_ids,
        samples_per_prompt=samples_per_prompt,
        pad_id=tokenizer.pad_id,
        max_rows=how.max_rows,
        prompt_length=how.max_prompt_tokens,
        borders=sampler.Borders(steps=how.segment),
    )


def stop_at(config: ExperimentConfig, tokenizer: Tokenizer) -> sampler.StopAt | None:
    """What ends completions at the run's stop strings; None where it has none."""
    strings = config.sampling.stop_strings
    return rollouts.stop_at(tokenizer, strings) if strings else None


def at_border() -> None:
    """Between two segments of a rollout: the run goes on, and may be told to end."""
    watchdog.beat()
    preemption.border()


class Sampled(NamedTuple):
    """Completions, and what speculation did for them."""

    rollout: Rollout
    drafts: int
    tokens_of_drafts: int

    def unscored(self, rows: list[data.Row], lang: Language, began: float) -> rollouts.Scored:
        """As the completions of these rows' prompts, which it took since then."""
        return replace(
            rollouts.unscored(rows, self.rollout, lang.tokenizer),
            seconds_rollout=time.perf_counter() - began,
            drafts=self.drafts,
            tokens_of_drafts=self.tokens_of_drafts,
        )


Sample = Callable[..., Sampled]
"""(step of the run, state, prompts as token ids, row ids, who wants to know of rows as they end, further arguments of
`sampler.sample`) -> completions of the prompts."""


def sampling(
    setup: Setup,
    role: str = "policy",
    completions: int | None = None,
    temperature: float | None = None,
    purpose: Purpose = Purpose.ROLLOUT,
) -> Sample:
    """What samples from a role's model at the run's settings but for those given."""
    config, lang = setup.config, setup.language
    answers = setup.acting(role)
    group = config.batch.completions if completions is None else completions
    how, ends = sampler_config(config, lang.tokenizer, group), stop_at(config, lang.tokenizer)
    how = replace(how, speculation=config.sampling.speculation)
    if temperature is not None:
        how = replace(how, temperature=temperature)
    looks: dict[str, Any] = {"stop_at": ends, "at_border": at_border}
    looks["drafter"] = setup.policy(setup.drafter) if setup.drafter else None

    def sample(
        step: int,
        state: TrainState,
        prompts: list[list[int]],
        row_ids: np.ndarray,
        on_finished: sampler.OnFinished | None,
        **further: Any,
    ) -> Sampled:
        verified: list[tuple[int, int]] = []
        watchdog.mark(f"the rollout of step {step}")
        with jax.set_mesh(answers.mesh):
            rollout = sampler.sample(
                answers.policy,
                answers.params(state.params),
                prompts,
                sampler.run_key(config.seed, purpose, step),
                how,
                row_ids=row_ids,
                policy_step=int(state.step),
                mesh=answers.mesh,
                on_finished=on_finished,
                on_verified=lambda drafts, tokens: verified.append((drafts, tokens)),
                **looks,
                **further,
            )
        watchdog.mark(f"the rewards of step {step}")
        return Sampled(rollout, sum(one for one, _ in verified), sum(one for _, one in verified))

    return sample


RollOut = Callable[[int, TrainState, list[data.Row], int], rollouts.Scored]
"""(step of the run, state, rows, id of the first completion in it) -> completions of the rows' prompts, scored."""


def roller(setup: Setup, role: str = "policy", completions: int | None = None, **others: Any) -> RollOut:
    """What completes prompts with a role's model: the group of each prompt, at the run's sampling settings but for
    those given; others: see `sampling`."""
    config, lang = setup.config, setup.language
    sample, functions = sampling(setup, role, completions, **others), reward_functions(config)
    group = config.batch.completions if completions is None else completions

    def roll_out(step: int, state: TrainState, rows: list[data.Row], first: int) -> rollouts.Scored:
        found: list[Sampled] = []

        def generate(prompts: list[list[int]], row_ids: np.ndarray, on_finished: sampler.OnFinished | None) -> Rollout:
            found.append(sample(step, state, prompts, row_ids, on_finished))
            return found[-1].rollout

        row_ids = first + np.arange(len(rows) * group)
        longest, limits = config.sampling.max_prompt_tokens, config.reward_limits
        scored = rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, longest, limits.fault_share)
        return replace(scored, drafts=found[-1].drafts, tokens_of_drafts=found[-1].tokens_of_drafts)

    return roll_out


def rollout_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Completions of the stream's prompts by the current policy, scored."""
    del params
    config = setup.config
    stream = dataset.make_stream(config, stage, setup.language)
    roll_out, worth = roller(setup), prompt_values(setup, stage)
    size = config.batch.prompts * config.batch.completions

    def draw(step: int, state: TrainState) -> Drawn:
        def roll(rows: list[data.Row], round_: int) -> rollouts.Scored:
            scored = roll_out(step, state, rows, round_ * size)
            return scored if worth is None else with_baseline(scored, worth(step, state, rows, round_))

        return as_drawn(rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds), step)

    return Source(draw, stream.get_state, stream.set_state)


def as_drawn(scored: rollouts.Scored, step: int, **others: float) -> Drawn:
    """Scored completions as the experience of a step of the run, with these metrics in place of their own."""
    metrics = rollouts.metrics(scored) | others
    return Drawn(scored.rollout, metrics, rollouts.records(scored, step), rollouts.warnings(scored))


def prompt_values(setup: Setup, stage: Stage) -> Callable[[int, TrainState, list[data.Row], int], np.ndarray] | None:
    """What tells how much prompts are worth, (step, state, rows, round) -> one number a row, NaN where nothing judged
    it; None where the stage's algorithm asks for none."""
    wanted = stage.algorithm.needs.prompt_value
    if wanted is None:
        return None
    count, temperature = wanted.samples, 0.0 if wanted.greedy else None
    roll_out = roller(setup, wanted.role, count, temperature=temperature, purpose=Purpose.BASELINE)

    def worth(step: int, state: TrainState, rows: list[data.Row], round_: int) -> np.ndarray:
        earned = roll_out(step, state, rows, round_ * len(rows) * count).rewards.reshape(-1, count)
        return np.asarray(advantages.optimal_value(jnp.asarray(earned), jnp.isfinite(earned), wanted.beta))

    return worth


def with_baseline(scored: rollouts.Scored, values: np.ndarray) -> rollouts.Scored:
    """The completions with what their prompts are worth; those of a prompt without a value are not learned from."""
    baseline = np.repeat(values, len(scored.rewards) // len(values)).astype(np.float32)
    rollout, known = scored.rollout, np.isfinite(baseline)
    baseline = np.where(known, baseline, np.float32(0.0))
    return replace(scored, rollout=replace(rollout, baseline=baseline, scored=rollout.scored & known))


def demonstration_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """The stream's demonstrations as they are."""
    del params
    config, lang = setup.config, setup.language
    stream = dataset.make_stream(config, stage, lang)
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        del step, state
        return Drawn(data.demonstrations(next(stream)[1], lang.tokenizer, length), {}, [], [])

    return Source(draw, stream.get_state, stream.set_state)


def completion_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """The stream's prompts, a share completed by the policy, the others by a teacher or as the data have them."""
    del params
    needs, config, lang = stage.algorithm.needs, setup.config, setup.language
    stream = dataset.make_stream(config, stage, lang)
    own = needs.shares(config.batch.prompts).get("policy", 0)
    by_policy, by_other = roller(setup, "policy"), needs.sampled_by and roller(setup, needs.sampled_by)
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        rows = next(stream)[1]
        drawn, parts = Drawn(None, {}, [], []), []
        if own:
            scored = by_policy(step, state, rows[:own], 0)
            parts.append((scored.rollout, True))
            found = rollouts.metrics(scored)
            drawn = Drawn(None, found, rollouts.records(scored, step), rollouts.warnings(scored))
        if own < len(rows) and by_other:
            scored = by_other(step, state, rows[own:], own * config.batch.completions)
            parts.append((scored.rollout, False))
            drawn.metrics["distill/teacher_reward"] = rollouts.metrics(scored)["reward/mean"]
            drawn.records.extend(record | {"by": needs.sampled_by} for record in rollouts.records(scored, step))
            drawn.warnings.extend(rollouts.warnings(scored))
        elif own < len(rows):
            parts.append((data.demonstrations(rows[own:], lang.tokenizer, length), False))
        return drawn._replace(data=together(parts))

    return Source(draw, stream.get_state, stream.set_state)


def together(parts: list[tuple[Rollout | Demonstrations, bool]]) -> Completions:
    """Texts and whether they are the policy's own, as one batch; groups are numbered anew."""
    length = max(texts.tokens.shape[1] for texts, _ in parts)
    groups, columns = 0, []
    for texts, on_policy in parts:
        wider = ((0, 0), (0, length - texts.tokens.shape[1]))
        group_id = groups + np.unique(np.asarray(texts.group_id), return_inverse=True)[1]
        groups = int(group_id.max()) + 1
        tokens, mask = np.pad(np.asarray(texts.tokens), wider), np.pad(np.asarray(texts.action_mask), wider)
        columns.append((tokens, mask, group_id.astype(np.int32), np.full(len(tokens), on_policy)))
    arrays: list[Any] = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    return Completions(*arrays)


SOURCES: dict[type, Callable[[Setup, Stage, Params], Source]] = {
    Rollout: rollout_source,
    Demonstrations: demonstration_source,
    Completions: completion_source,
}


def lay_out(config: ExperimentConfig, experience: Any, mesh: Mesh) -> Experience:
    """The experience with its place in packed rows, rows spread over the mesh."""

    def place(array: Any) -> jax.Array:
        return sharding.put(array, experience_sharding(mesh, np.shape(array)))

    layout = layout_of(config, experience)
    by_kernel = roles.has_attention_kernel(config, mesh) and flash_attention.fits(config.batch.row_length)
    if by_kernel or config.mesh.context > 1:  # neither reads them
        layout = replace(layout, key_tiles=None)  # whose sizes differ from batch to batch: programs compiled in vain
    return jax.tree.map(place, Experience(experience, layout))


def layout_of(config: ExperimentConfig, experience: Any) -> Layout:
    """Which completion goes where in the packed rows of which micro-batch."""
    return packing.lay_out(
        np.asarray(experience.action_mask),
        np.asarray(experience.group_id),
        row_length=config.batch.row_length,
        micro_batch_rows=config.batch.micro_batch_rows,
        minibatches=config.batch.minibatches,
        whole_groups=isinstance(experience, Pairs),
    )


def experience_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Where an array of an `Experience` lies: completions [N, ...] and packed rows [M, K, R, S] are spread by rows."""
    return sharding.batch_sharding(mesh, shape, 2 if len(shape) >= 4 else 0)


def reward_functions(config: ExperimentConfig) -> dict[str, rewards.Reward]:
    """Name -> function, in the order of --reward."""
    how = (config.reward_limits, config.allow_unsandboxed_code)
    return {shown(name): resolve_reward(name, *how) for name in config.reward}


def judge(config: ExperimentConfig) -> str | None:
    """The reward that says what is correct in evaluations; None where a run has none."""
    return config.evaluation.reward or next(iter(config.reward), None)


def shown(reward: str) -> str:
    """What metrics and messages call a reward: FILE.function."""
    return Path(reward).name.replace(".py:", ".")


def resolve_reward(
    name: str, limits: rewards.RewardLimits = rewards.DEFAULT_LIMITS, allow_unsandboxed_code: bool = False
) -> rewards.Reward:
    """A built-in reward, a function of FILE.py:function, or a trained reward model: its directory or its run's."""
    if name == "python_tests" and sandbox.refusal():
        if allow_unsandboxed_code:
            return rewards.python_tests_unsandboxed
        sandbox.require()
    if name in rewards.BUILTIN:
        return rewards.BUILTIN[name]
    if Path(name).expanduser().is_dir():
        return reward_models.load(name)
    return rewards.from_path(name, limits)
