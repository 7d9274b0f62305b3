"""Checks of settings that must go together. Each function raises InputError if they do not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.algos import AlgorithmConfig
from tpu_rl.errors import InputError
from tpu_rl.experience import constraints
from tpu_rl.experience.config import BatchConfig, RolloutConfig, SamplingConfig
from tpu_rl.losses.observations import ObservationLoss
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.rollout.group_selection import num_kept
from tpu_rl.sampler.config import TEMPERATURES, is_temperature
from tpu_rl.storage import gcs


def check_positive(values: Mapping[str, int]) -> None:
    """Check that each flag is at least 1."""
    for flag, value in values.items():
        if value < 1:
            raise InputError(f"{flag} is {value}", where=flag, fix="use at least 1")


def check_not_negative(values: Mapping[str, float]) -> None:
    """Check that each flag is at least 0."""
    for flag, value in values.items():
        if value < 0:
            raise InputError(f"{flag} is {value}", where=flag, fix="use at least 0")


def check_run_dir(run_dir: str) -> None:
    """Check that the run folder is local, or a well-formed gs:// address."""
    if gcs.is_address(run_dir):
        gcs.split(run_dir)
    elif "://" in run_dir:
        raise InputError(
            f"the run folder {run_dir} is neither local nor gs://",
            where="--run-dir",
            fix="give a local folder, or one in a bucket of Google Cloud Storage, "
            "as in gs://bucket/name",
        )


def named_sets(sets: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Return name -> data of --evaluation.sets NAME=DATA.

    Raises:
        InputError: if a name is missing, stands twice, or would be that of other metrics; `tasks`
            are those of --evaluation.tasks.
    """
    named: dict[str, str] = {}
    for text in sets:
        name, _, path = text.partition("=")
        why = ""
        if not path or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            why = "a name has letters, digits, - and _, and its data follow behind ="
        elif name in named:
            why = f"there is another set {name}"
        elif name in tasks or name.endswith("reward"):
            why = f"other metrics begin with eval/{name}/"
        if why:
            raise InputError(
                f"{text!r} is no set of held-out rows",
                where="--evaluation.sets",
                why=why,
                fix="as in --evaluation.sets hard=hard.jsonl facts=facts.jsonl",
            )
        named[name] = path
    return named


def check_phases(last_steps: Sequence[int], num_steps: int) -> None:
    """Check that phases end one after the other, before the run does."""
    ends = [0, *last_steps, num_steps]
    if num_steps > 0 and sorted(set(ends)) != ends:
        raise InputError(
            f"phases end with steps {', '.join(map(str, ends[1:]))}",
            where="--phases, --steps",
            fix=f"let each end after the one before it (--phases.0.until), and give at least "
            f"--steps {len(ends) - 1}",
        )


def check_sampling(
    sampling: SamplingConfig, batch: BatchConfig, specs: Sequence[ExperienceSpec]
) -> None:
    """Check stop strings, and the groups that algorithms compare."""
    if sampling.stop_strings and any(spec.source == "q_examples" for spec in specs):
        raise InputError(
            "Q# knows no stop strings",
            where="--sampling.stop-strings",
            why="its answers are continued from the middle, where half of such a string may stand",
            fix="drop them",
        )
    if "" in sampling.stop_strings:
        raise InputError("a stop string is empty", where="--sampling.stop-strings", fix="drop it")
    why = "completions of one prompt are compared with each other"
    for spec in specs:
        if batch.group_size < spec.smallest_group:
            raise InputError(
                f"a group of {batch.group_size} completion teaches nothing: "
                "its advantage is always 0",
                where="--batch.group-size",
                why=why,
                fix="use at least 2; 8 is usual",
            )
        if spec.smallest_group > 1 and sampling.temperature <= 0:
            raise InputError(
                f"sampling temperature {sampling.temperature} makes all completions of a prompt "
                "equal",
                where="--sampling.temperature",
                why=why,
                fix="use 1.0",
            )


def check_observations(answers: bool, algorithms: Sequence[AlgorithmConfig]) -> None:
    """Check that there are observations if an algorithm learns to predict them."""
    predicts = any(
        isinstance(algorithm, ObservationLoss) and algorithm.observation_coef > 0
        for algorithm in algorithms
    )
    if predicts and not answers:
        raise InputError(
            "there are no observations to predict",
            where="--algorithm.observation-coef",
            why="completions are single turns, which nothing answers",
            fix="give --environment or --agent, or leave the coefficient out",
        )


def check_rollouts(
    rollout: RolloutConfig, batch: BatchConfig, specs: Sequence[ExperienceSpec]
) -> None:
    """Check partial and stale rollouts, which train on older completions."""
    check_not_negative({"--batch.staleness": batch.staleness})
    if not rollout.partial and not batch.staleness:
        return
    where = "--rollout.partial" if rollout.partial else "--batch.staleness"
    if not 0 <= rollout.partial < batch.prompts:
        raise InputError(
            f"{rollout.partial} of {batch.prompts} groups cannot be carried over",
            where=where,
            fix=f"use 0 to {batch.prompts - 1}; an eighth of --batch.prompts is a beginning",
        )
    if rollout.partial and batch.staleness:
        raise InputError(
            "rollouts are partial or stale, not both",
            where=f"{where}, --batch.staleness",
            why="a completion that continues would be older than the number says",
            fix="use one",
        )
    if rollout.dynamic_sampling_rounds:
        raise InputError(
            f"{where} and dynamic sampling do not go together",
            where=f"{where}, --rollout.dynamic-sampling-rounds",
            why="two would decide it: both choose the groups of a batch",
            fix="use one of them",
        )
    if any(spec.source != "rollouts" or spec.latest_policy for spec in specs):
        raise InputError(
            "this algorithm takes no older completions",
            where=where,
            why="it learns from other things than scored completions, or from those of the latest "
            "policy alone",
            fix="leave it out",
        )


def check_replay(
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    environment: str,
    agent: str,
    algorithms: Sequence[AlgorithmConfig],
) -> None:
    """Check that the policy learns, and that the sampler records the routing of all that it learns
    from."""
    if not rollout.replay_routing:
        return
    where = "--rollout.replay-routing"
    if any(algorithm.experience.source != "rollouts" for algorithm in algorithms):
        raise InputError(
            "this algorithm does not learn from scored completions alone",
            where=where,
            why="only of these the sampler's routing is known",
            fix="leave it out",
        )
    if not any(algorithm.roles["policy"].trainable for algorithm in algorithms):
        raise InputError(
            "the policy does not learn",
            where=where,
            why="its routing is replayed where it learns, and no other model's",
            fix="leave it out",
        )
    whys = {
        "--rollout.partial": (
            rollout.partial > 0,
            "a completion that continues is read anew, by another policy",
        ),
        "--sampling.speculation.tokens": (
            sampling.speculation.tokens > 0,
            "drafts are read beside a completion's own tokens",
        ),
        "--environment": (bool(environment), "routing is recorded of single turns"),
        "--agent": (bool(agent), "routing is recorded of single turns"),
    }
    for flag, (is_given, why) in whys.items():
        if is_given:
            raise InputError(
                f"{where} and {flag} do not go together",
                where=f"{where}, {flag}",
                why=why,
                fix="leave one of them out",
            )


def check_overlong_penalty(agent: str, algorithms: Sequence[AlgorithmConfig]) -> None:
    """Check that the length that a penalty is about has a limit."""
    if agent and any(getattr(algorithm, "overlong_buffer", 0) for algorithm in algorithms):
        raise InputError(
            "the overlong penalty and --agent do not go together",
            where="--algorithm.overlong-buffer, --agent",
            why="the limit is that of one answer, and the penalty that of an episode",
            fix="leave one of them out, or let the agent's reward judge the length",
        )


def check_sampler_devices(
    sampling: SamplingConfig, batch: BatchConfig, exact_sampling: bool
) -> None:
    """Check that devices that only sample have something to do while the others learn."""
    check_not_negative({"--sampling.devices": sampling.devices})
    if not sampling.devices:
        return
    if not batch.staleness:
        raise InputError(
            "devices that only sample would wait for each update, and the others for the sampler",
            where="--sampling.devices, --batch.staleness",
            why="on-policy rollouts need the weights after the update",
            fix="add --batch.staleness 1, or leave out --sampling.devices",
        )
    if exact_sampling:
        raise InputError(
            "exact sampling and devices that only sample do not go together",
            where="--model.exact-sampling, --sampling.devices",
            why="an older policy samples, so that the gap is not 0",
            fix="leave one of them out",
        )
    if sampling.tensor_parallel == "train-mesh":
        raise InputError(
            "devices that only sample have no training mesh",
            where="--sampling.devices, --sampling.tensor-parallel",
            fix="give a number, or leave it out",
        )


def check_batch(batch: BatchConfig, sampling: SamplingConfig, context_devices: int) -> None:
    """Check minibatches, and the length of packed rows."""
    if batch.prompts % batch.num_minibatches:
        valid = [count for count in range(1, batch.prompts + 1) if batch.prompts % count == 0]
        nearest = sorted(valid, key=lambda count: abs(count - batch.num_minibatches))[:2]
        flags = [f"--batch.num-minibatches {count}" for count in sorted(nearest)]
        raise InputError(
            f"{batch.prompts} prompts cannot be cut into {batch.num_minibatches} equal minibatches",
            where="--batch.prompts, --batch.num-minibatches",
            fix=f"nearest valid: {' or '.join(flags)}",
        )
    if batch.row_length < sampling.max_prompt_tokens + sampling.max_new_tokens:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot hold a prompt with a completion",
            where="--batch.row-length",
            why=f"they may have {sampling.max_prompt_tokens} + {sampling.max_new_tokens} tokens",
            fix=RAISE_ROW_LENGTH,
        )
    unit = 256 * context_devices
    if context_devices > 1 and batch.row_length % unit:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot be cut evenly over "
            f"{context_devices} devices",
            where="--batch.row-length, --mesh.context",
            why="each takes a stretch from the front and one from the end, of blocks of 128 tokens",
            fix=f"--batch.row-length {-(-batch.row_length // unit) * unit}",
        )


RAISE_ROW_LENGTH = (
    "raise --batch.row-length, or lower --sampling.max-prompt-tokens or --sampling.max-new-tokens"
)

# --- runs that are about to train; a configuration that was saved earlier can always be read ---


def check_base_dtype(base_dtype: str, sampled_dtype: str) -> None:
    """Check that matrices are quantized once."""
    if base_dtype != "unquantized" and sampled_dtype != "computed":
        raise InputError(
            "the weights under the adapters are quantized already",
            where="--sampling.weight-dtype, --model.lora.base-dtype",
            why="the sampler reads the same matrices as the update",
            fix="use --sampling.weight-dtype computed",
        )


def check_exact_sampling(
    sampling: SamplingConfig,
    tensor_devices: int,
    context_devices: int,
    attention: str,
    float32_sums: bool,
) -> None:
    """Check that sampler and trainer can compute the same bits."""

    def refuse(what: str, where: str, why: str, fix: str) -> None:
        where = f"--model.exact-sampling, {where}"
        raise InputError(
            f"exact sampling and {what} do not go together", where=where, why=why, fix=fix
        )

    if float32_sums:
        refuse(
            "float32 sums",
            "--model.float32-sums",
            "it sums in an order of its own, in float32 in blocks",
            "leave one of them out",
        )
    if sampling.kv_cache_dtype == "int8":
        refuse(
            "an int8 cache",
            "--sampling.kv-cache-dtype",
            "the update reads keys that are not rounded",
            "use --sampling.kv-cache-dtype computed",
        )
    if sampling.weight_dtype != "computed":
        refuse(
            "quantized weights",
            "--sampling.weight-dtype",
            "the update reads weights that are not rounded",
            "use --sampling.weight-dtype computed",
        )
    if sampling.tensor_parallel not in (None, "train-mesh", tensor_devices):
        refuse(
            "another tensor parallelism in sampling",
            "--sampling.tensor-parallel",
            "partial sums over devices would be added in another order",
            f"use --sampling.tensor-parallel {tensor_devices}, that of the mesh",
        )
    if context_devices > 1:
        refuse(
            "context parallelism",
            "--mesh.context",
            "each device holds a part of every row's keys",
            "use --mesh.context 1",
        )
    if attention == "cudnn":
        refuse(
            "cuDNN's attention",
            "--model.attention",
            "its order of sums is its own",
            "use --model.attention auto",
        )


def check_recurrence(
    batch: BatchConfig,
    sampling: SamplingConfig,
    context_devices: int,
    exact_sampling: bool,
    specs: Sequence[ExperienceSpec],
) -> None:
    """Check that nothing needs an earlier state of a model with a recurrent state, which keeps the
    latest one only."""

    def refuse(what: str, where: str, why: str, fix: str) -> None:
        raise InputError(
            f"{what} and a model with linear attention do not go together",
            where=where,
            why=why,
            fix=fix,
        )

    if batch.share_prefixes:
        refuse(
            "shared prompts in packed rows",
            "--batch.share-prefixes",
            "each completion would have to begin with the recurrent state at the end of its prompt",
            "use --batch.no-share-prefixes, which repeats the prompt for each completion",
        )
    if sampling.speculation.tokens:
        refuse(
            "drafts",
            "--sampling.speculation.tokens",
            "a recurrent state cannot take back the tokens of a draft that are not accepted",
            "use --sampling.speculation.tokens 0",
        )
    if exact_sampling:
        refuse(
            "exact sampling",
            "--model.exact-sampling",
            "sums over chunks of tokens are in another order than token by token",
            "leave the flag out",
        )
    if context_devices > 1:
        refuse(
            "context parallelism",
            "--mesh.context",
            "a recurrent state runs through all tokens of a row, which would be on several devices",
            "use --mesh.context 1",
        )
    if any(spec.source == "q_examples" for spec in specs):
        refuse(
            "Q#",
            "--algorithm",
            "it looks at several next tokens, and goes back to the state before them",
            "use another method, such as grpo",
        )


def check_training(algorithms: Sequence[AlgorithmConfig], sampling: SamplingConfig) -> None:
    """Check that teachers are given, and that the sampling temperature suits the losses."""
    if not is_temperature(sampling.temperature):
        raise InputError(
            f"a sampling temperature of {sampling.temperature}",
            where="--sampling.temperature",
            why=f"it must be 0 or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}",
            fix="use 1.0; 0 takes the most likely token",
        )
    for algorithm in algorithms:
        if getattr(algorithm, "teacher", None) == "":
            raise InputError(
                "no teacher given",
                where="--algorithm.teacher",
                fix="give a Hugging Face directory, a hub id or the model folder of a run",
            )
        spec = algorithm.experience
        trains_policy = spec.source == "rollouts" and algorithm.roles["policy"].trainable
        if (trains_policy or spec.positive_temperature) and sampling.temperature == 0:
            raise InputError(
                "a policy cannot learn at sampling temperature 0",
                where="--sampling.temperature",
                why="the loss divides logits by it, as sampling does: "
                "there are no log-probabilities at 0",
                fix="use 1.0",
            )
        if spec.transforms is not None and spec.source != "rollouts":
            raise InputError(
                f"the algorithm brings transforms, and learns from {spec.source}",
                where="ExperienceSpec.transforms of the algorithm",
                why="only batches of rollouts are transformed",
                fix='use ExperienceSpec("rollouts", transforms=...), or bring none',
            )
        if spec.source == "pairs" and spec.reference_log_probs and spec.sampled_by == "reference":
            _check_reference_log_probs(sampling)
        if isinstance(algorithm, SamplerCorrection):
            _check_correction(algorithm, sampling)
        buffer = getattr(algorithm, "overlong_buffer", 0)
        if buffer > sampling.max_new_tokens:
            raise InputError(
                f"an overlong buffer of {buffer} tokens before a limit of "
                f"{sampling.max_new_tokens}",
                where="--algorithm.overlong-buffer, --sampling.max-new-tokens",
                why="even an empty completion would be penalized for its length",
                fix=f"use at most {sampling.max_new_tokens}; DAPO uses a fifth of the limit",
            )


def _check_correction(algorithm: SamplerCorrection, sampling: SamplingConfig) -> None:
    """Check that importance weights and rejections compare two different distributions."""
    plain = SamplingConfig()
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")
    is_plain = all(getattr(sampling, name) == getattr(plain, name) for name in names)
    if algorithm.compares and not algorithm.recomputes and is_plain:
        raise InputError(
            "every importance weight would be 1, and nothing would be rejected",
            where="--algorithm.old-log-probs",
            why="the sampler's log-probs are compared with themselves",
            fix="leave it out, and the old log-probs are recomputed",
        )


def _check_reference_log_probs(sampling: SamplingConfig) -> None:
    why = "the loss compares with the reference's log-probs as they were in sampling"
    if sampling.temperature != 1:
        raise InputError(
            f"the reference is sampled at temperature {sampling.temperature}, and the loss is at 1",
            where="--sampling.temperature",
            why=why,
            fix="use 1.0",
        )
    if sampling.kv_cache_dtype == "int8":
        raise InputError(
            "a rounded cache would be in the reference's log-probs",
            where="--sampling.kv-cache-dtype",
            why=why,
            fix="use --sampling.kv-cache-dtype computed",
        )
    if sampling.weight_dtype != "computed":
        raise InputError(
            "quantized weights would be in the reference's log-probs",
            where="--sampling.weight-dtype",
            why=why,
            fix="use --sampling.weight-dtype computed",
        )


def check_pairs(
    specs: Sequence[ExperienceSpec],
    rewards: Sequence[str],
    batch: BatchConfig,
    sampling: SamplingConfig,
) -> None:
    """Check that sampled pairs have a reward to tell them apart, and fit a packed row."""
    sampled = [spec for spec in specs if spec.source == "pairs" and spec.sampled_by is not None]
    if sampled and not rewards:
        raise InputError(
            "no reward tells good completions from bad", where="--reward", fix="name one"
        )
    prompts = 1 if batch.share_prefixes else 2
    pair_length = prompts * sampling.max_prompt_tokens + 2 * sampling.max_new_tokens
    if not all(spec.graded for spec in sampled) and batch.row_length < pair_length:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot hold a prompt with both its "
            "completions",
            where="--batch.row-length",
            why=f"they may have {prompts} x {sampling.max_prompt_tokens} + 2 x "
            f"{sampling.max_new_tokens} tokens, and pairs stay together",
            fix=RAISE_ROW_LENGTH,
        )


def check_opponent(
    specs: Sequence[ExperienceSpec], batch: BatchConfig, rollout: RolloutConfig, is_judged: bool
) -> None:
    """Check that something judges, and that each completion has another one of its prompt."""
    opposed = [spec for spec in specs if spec.opponent is not None]
    if opposed and not is_judged:
        raise InputError(
            "no reward tells the policy's completions from its opponent's",
            where="--reward",
            fix="name one",
        )
    if not any(spec.source == "pairs" for spec in opposed):
        return
    if batch.group_size % 2:
        raise InputError(
            f"{batch.group_size} completions of a prompt are not half the policy's",
            where="--batch.group-size",
            why="half of them are the policy's and half the reference's",
            fix=f"use --batch.group-size {batch.group_size + 1}",
        )
    if rollout.dynamic_sampling_rounds:
        raise InputError(
            "dynamic sampling compares the completions of one model",
            where="--rollout.dynamic-sampling-rounds, --algorithm.pairs",
            fix="use --rollout.dynamic-sampling-rounds 0",
        )


def check_changing_sampler(
    algorithms: Sequence[AlgorithmConfig],
    batch: BatchConfig,
    rollout: RolloutConfig,
    exact_sampling: bool,
) -> None:
    """Check that a batch is learned with the mask and the temperature with which it was sampled."""
    updates = batch.num_minibatches * batch.ppo_epochs
    for algorithm in algorithms:
        spec = algorithm.experience
        if spec.nucleus is None and not spec.adapts_temperature:
            continue
        flag = (
            "--algorithm.sampled-entropy" if spec.adapts_temperature else "--algorithm.mask-top-p"
        )
        if spec.nucleus is not None and spec.nucleus.every % updates:
            raise InputError(
                f"the mask would move within a batch of {updates} updates",
                where="--algorithm.mask-every",
                why="a batch is learned with the mask with which it was sampled",
                fix=f"use a multiple of {updates}",
            )
        moved = "it may have moved since a completion began"
        whys = {
            "--batch.staleness": (batch.staleness > 0, moved),
            "--rollout.partial": (rollout.partial > 0, moved),
            "--model.exact-sampling": (
                exact_sampling,
                "the sampler's logits are divided or dropped",
            ),
        }
        _refuse_together(flag, "a sampler that changes cannot be used", whys)


def check_dynamic_sampling(
    rollout: RolloutConfig, batch: BatchConfig, specs: Sequence[ExperienceSpec]
) -> None:
    """Check that dynamic sampling has groups to compare, and leaves those that solutions join."""
    chooses = rollout.dynamic_sampling_rounds or rollout.keep_variance_share < 1
    if chooses and any(spec.expert_column or spec.replay or spec.refinement for spec in specs):
        raise InputError(
            "groups are chosen by their rewards before the solutions join them",
            where="--rollout.dynamic-sampling-rounds, --rollout.keep-variance-share",
            why="groups without a success, which solutions help most, have equal rewards",
            fix="leave both out",
        )
    if rollout.dynamic_sampling_size == "needed" and not rollout.dynamic_sampling_rounds:
        raise InputError(
            "--rollout.dynamic-sampling-size needed changes nothing without further rounds",
            where="--rollout.dynamic-sampling-size",
            why="--rollout.dynamic-sampling-rounds is 0",
            fix="add --rollout.dynamic-sampling-rounds 3, or leave it out",
        )
    if rollout.dynamic_sampling_rounds and batch.group_size == 1:
        raise InputError(
            "no group of one completion has different rewards",
            where="--rollout.dynamic-sampling-rounds, --batch.group-size",
            why="dynamic sampling replaces groups whose rewards are all equal",
            fix="use --rollout.dynamic-sampling-rounds 0",
        )


def check_added_rows(specs: Sequence[ExperienceSpec], conversations: str) -> None:
    """Check that rows which join a group have completions of single turns beside them.

    `conversations` names the environment or agent that answers the policy, "" without one.
    """
    if conversations and any(spec.rows_added for spec in specs):
        raise InputError(
            "solutions and texts cannot join conversations",
            where=f"--environment or --agent {conversations}, and --algorithm",
            why="a row that joins a group stands beside completions of a single turn",
            fix="train without it, or without solutions and --algorithm.pretraining-path",
        )


def check_variance_filter(
    rollout: RolloutConfig, batch: BatchConfig, specs: Sequence[ExperienceSpec]
) -> None:
    """Check that the filter by variance has groups to choose from, and leaves enough of them."""
    share = rollout.keep_variance_share
    where = "--rollout.keep-variance-share"
    if share == 1:
        return
    if batch.group_size == 1:
        raise InputError(
            "the rewards of one completion have no variance",
            where=f"{where}, --batch.group-size",
            fix=f"use {where} 1",
        )
    if any(spec.source != "rollouts" for spec in specs):
        raise InputError(
            "this algorithm does not learn from scored completions alone",
            where=where,
            why="the filter leaves out prompts of online rollouts",
            fix="leave it out",
        )
    kept = num_kept(batch.prompts, share)
    if kept % batch.num_minibatches:
        raise InputError(
            f"{kept} of {batch.prompts} prompts are kept, which cannot be cut into "
            f"{batch.num_minibatches} equal minibatches",
            where=f"{where}, --batch.num-minibatches",
            fix="change the share, --batch.prompts or --batch.num-minibatches",
        )


def check_likelihood(
    rollout: RolloutConfig,
    batch: BatchConfig,
    algorithms: Sequence[AlgorithmConfig],
    rewards: Sequence[str],
    environment: str,
    agent: str,
) -> None:
    """Check that the likelihood of the reference answer can be a reward."""
    likelihood = rollout.likelihood
    if not likelihood.coef:
        return
    where = "--rollout.likelihood.coef"
    if not 0 < likelihood.coef < math.inf or not likelihood.mark:
        raise InputError(
            "the coefficient is not above 0, or the mark is empty",
            where=f"{where}, --rollout.likelihood.mark",
            fix="use 1, and the text that stands before answers, e.g. '####'",
        )
    whys = {
        "--environment": (bool(environment), "a conversation has no single answer"),
        "--agent": (bool(agent), "a conversation has no single answer"),
        "--rollout.dynamic-sampling-rounds": (
            rollout.dynamic_sampling_rounds > 0,
            "groups are filled up before the likelihood is known",
        ),
        "--rollout.normalize-rewards": (
            rollout.normalize_rewards,
            "only terms of --reward are scaled one by one",
        ),
        "--batch.group-size": (batch.group_size == 1, "one completion cannot be compared"),
        "--reward": ("likelihood" in rewards, "its values would have the name of another reward"),
        "--algorithm": (
            any(algorithm.experience.source != "rollouts" for algorithm in algorithms),
            "it does not learn from rewards of rollouts",
        ),
        "--algorithm.method critique": (
            any(algorithm.experience.refinement is not None for algorithm in algorithms),
            "refinements are rewarded without it",
        ),
        "--rollout.likelihood.by reference": (
            likelihood.by == "reference"
            and any("reference" not in algorithm.roles for algorithm in algorithms),
            "the algorithm has no reference; --algorithm.kl-loss-coef 0.001 gives it one",
        ),
        "--rollout.likelihood.form consistent": (
            likelihood.form == "consistent" and not rewards,
            "it adds to the --reward of right completions",
        ),
    }
    _refuse_together(where, "the likelihood is no reward", whys)


def check_hints(
    rollout: RolloutConfig, specs: Sequence[ExperienceSpec], environment: str, agent: str
) -> None:
    """Check that nothing else would change the rewards that a teacher with a hint gives."""
    if all(spec.hint is None for spec in specs):
        return
    whys = {
        "--environment": (bool(environment), "a hint joins the prompt of a single turn"),
        "--agent": (bool(agent), "a hint joins the prompt of a single turn"),
        "--rollout.likelihood.coef": (
            rollout.likelihood.coef > 0,
            "the log-ratios of the teacher are the only rewards",
        ),
        "--rollout.normalize-rewards": (
            rollout.normalize_rewards,
            "the log-ratios of the teacher are the only rewards",
        ),
    }
    _refuse_together("--algorithm", "the teacher's hint has no place", whys)


def check_thinking(
    sampling: SamplingConfig,
    rollout: RolloutConfig,
    environment: str,
    agent: str,
    specs: Sequence[ExperienceSpec],
) -> None:
    """Check that completions can be sampled in phases."""
    thinking = sampling.thinking
    if not thinking.is_on:
        return
    where = "--sampling.thinking"
    if max(thinking.max_tokens, thinking.min_tokens) >= sampling.max_new_tokens:
        raise InputError(
            "no token is left for the answer",
            where=f"{where}, --sampling.max-new-tokens",
            why=f"completions have {sampling.max_new_tokens} tokens, the thought's included",
            fix="raise --sampling.max-new-tokens",
        )
    whys = {
        "--environment": (bool(environment), "turns of a conversation have no phases"),
        "--agent": (bool(agent), "turns of a conversation have no phases"),
        "--rollout.partial": (rollout.partial > 0, "phases are not continued in another step"),
        "--rollout.replay-routing": (rollout.replay_routing, "phases are read anew"),
        "--sampling.speculation.tokens": (
            sampling.speculation.tokens > 0,
            "contexts of phases are too long for the drafts' cache",
        ),
        "--algorithm": (
            any(spec.source != "rollouts" for spec in specs),
            "it does not learn from rewards of rollouts",
        ),
    }
    _refuse_together(where, "thoughts have no limits", whys)


def check_curriculum(
    rollout: RolloutConfig, specs: Sequence[ExperienceSpec], is_judged: bool
) -> None:
    """Check that rows can be chosen, and start, as the curriculum says."""
    curriculum = rollout.curriculum
    if curriculum == type(curriculum)():
        return
    where = "--rollout.curriculum"
    if any(spec.source != "rollouts" for spec in specs):
        raise InputError(
            "this algorithm has no curriculum",
            where=where,
            why="it does not learn from rewards of rollouts, so that rows have no pass rates",
            fix="leave it out, or choose rows by a filter stage of a recipe",
        )
    if not is_judged:
        raise InputError(
            "no reward says which completions pass",
            where=f"{where}, --reward",
            why="a likelihood is known after rows have been chosen",
            fix="name a reward; 0*NAME only measures",
        )
    low, high = curriculum.pass_rate
    if not 0 <= low <= high <= 1:
        raise InputError(
            f"{low:g} to {high:g} is no range of pass rates",
            where=f"{where}.pass-rate",
            fix="give the lower and the upper end, as 0.2 0.8",
        )
    first, last = curriculum.start
    if not 1 > first >= last >= 0 or (first > last) != (curriculum.start_batches > 0):
        raise InputError(
            f"the share of solutions cannot go from {first:g} to {last:g} in "
            f"{curriculum.start_batches} batches",
            where=f"{where}.start, {where}.start-batches",
            why="it falls from below 1 to at least 0, in one batch or more",
            fix="use for instance 0.75 0 and 100",
        )
    check_not_negative({f"{where}.refresh": curriculum.refresh})
    if curriculum.impact is not None and not curriculum.impact <= 1:
        raise InputError(
            f"no row has an impact of {curriculum.impact:g}",
            where=f"{where}.impact",
            fix="use at most 1, such as 0.6",
        )


def check_constraints(
    rollout: RolloutConfig, specs: Sequence[ExperienceSpec], rewards: Sequence[str]
) -> None:
    """Check the limits of rewards and lengths, and that nothing reads returns as they are."""
    constraints.parse_all(rollout.constraints, rewards)
    if not rollout.constraints:
        return
    whys = {
        "--rollout.normalize-rewards": (
            rollout.normalize_rewards,
            "a multiplier weighs rewards on their own scale",
        ),
        "--algorithm": (
            any(
                spec.source != "rollouts" or spec.prompt_value is not None or spec.raw_returns
                for spec in specs
            ),
            "it reads rewards as they are: for a baseline, a threshold, a clip or pairs",
        ),
    }
    _refuse_together("--rollout.constraints", "constraints cannot be held", whys)


def check_normalized_rewards(
    rollout: RolloutConfig,
    batch: BatchConfig,
    specs: Sequence[ExperienceSpec],
    rewards: Sequence[str],
    environment: str,
    agent: str,
) -> None:
    """Check that there are several rewards of several completions to normalize."""
    if not rollout.normalize_rewards:
        return
    where = "--rollout.normalize-rewards"
    whys = {
        "--reward": (len(rewards) < 2, "there is one reward, or none; scale its advantages"),
        "--batch.group-size": (batch.group_size == 1, "a group of one has no deviation"),
        "--environment": (bool(environment), "rewards of turns would lose their turns"),
        "--agent": (bool(agent), "rewards of turns would lose their turns"),
        "--algorithm": (
            any(
                spec.source != "rollouts" or spec.prompt_value is not None or spec.raw_returns
                for spec in specs
            ),
            "it reads rewards as they are: for a baseline, a threshold, a clip or pairs",
        ),
    }
    _refuse_together(where, "rewards cannot be normalized", whys)


def _refuse_together(where: str, what: str, whys: Mapping[str, tuple[bool, str]]) -> None:
    """Raise InputError if a flag does not go together with the setting `where`.

    `whys` has, for each flag, whether that is so, and the reason.
    """
    for flag, (is_wrong, why) in whys.items():
        if is_wrong:
            raise InputError(
                f"{what} with this {flag}",
                where=f"{where}, {flag}",
                why=why,
                fix=f"leave {where} out, or change {flag}",
            )
