"""Settings that must go together. Each function raises InputError if they do not.

Two settings that exclude each other, or need each other, are a line of a table. A setting is named
by its flag, which is on if it has not the default, as `ranges.is_on` says; by a flag with a value,
which is on if the setting has it; or by a name of `ALGORITHMS`, for what an algorithm is like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tpu_rl import ranges, wings
from tpu_rl.algos import AlgorithmConfig
from tpu_rl.errors import InputError
from tpu_rl.experience import constraints
from tpu_rl.experience.config import BatchConfig, SamplingConfig
from tpu_rl.losses.returns import ReturnSettings
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.rewards import registry, terms
from tpu_rl.rollout.group_selection import num_kept
from tpu_rl.storage import gcs

if TYPE_CHECKING:
    from tpu_rl.commands.config import ExperimentConfig

Table = Mapping[str, Mapping[str, str]]
"""Setting -> others that exclude it, or of which it needs one, as in "--a or --b" -> why."""

NOT_ROLLOUTS = "an --algorithm of other data than rollouts"
ONLY_LATEST = "an --algorithm of the latest policy alone"
RAW_RETURNS = "an --algorithm that reads returns as they are"
SOLUTIONS = "an --algorithm whose solutions join groups"
ADDS_ROWS = "an --algorithm whose solutions or texts join groups"
HINT = "an --algorithm whose teacher sees a hint"
CRITIQUE = "--algorithm.method critique"
NO_EPISODES = "an --algorithm that does not learn from episodes"
Q_SHARP = "the --algorithm Q#"
OPPONENT = "--algorithm.pairs policy_and_reference"
SAMPLED_PAIRS = "an --algorithm that compares sampled completions"
OPPOSED = "an --algorithm that compares with an opponent"
NO_REFERENCE = "an --algorithm without a reference"
LEARNS = "an --algorithm that trains the policy"

ALGORITHMS: Mapping[str, Callable[[AlgorithmConfig], bool]] = {
    NOT_ROLLOUTS: lambda x: x.experience.source != "rollouts",
    ONLY_LATEST: lambda x: x.experience.latest_policy,
    RAW_RETURNS: lambda x: x.experience.raw_returns or x.experience.prompt_value is not None,
    SOLUTIONS: lambda x: any(
        (x.experience.expert_column, x.experience.replay, x.experience.refinement)
    ),
    ADDS_ROWS: lambda x: x.experience.rows_added > 0,
    HINT: lambda x: x.experience.hint is not None,
    CRITIQUE: lambda x: x.experience.refinement is not None,
    NO_EPISODES: lambda x: x.experience.source not in ("rollouts", "accepted", "pairs"),
    Q_SHARP: lambda x: x.experience.source == "q_examples",
    OPPONENT: lambda x: x.experience.source == "pairs" and x.experience.opponent is not None,
    SAMPLED_PAIRS: lambda x: x.experience.source == "pairs" and x.experience.sampled_by is not None,
    OPPOSED: lambda x: x.experience.opponent is not None,
    NO_REFERENCE: lambda x: "reference" not in x.roles,
    LEARNS: lambda x: "policy" in x.roles and x.roles["policy"].trainable,
}
"""Properties of an algorithm, by name -> the test of one."""

MOVED = "it may have moved since a completion began"
ROUNDED = "the update reads numbers that are not rounded"
SINGLE_TURN = "routing is recorded of single turns"
ONE_ANSWER = "a conversation has no single answer"
NO_PHASES = "turns of a conversation have no phases"
OF_ROLLOUTS = "it does not learn from rewards of rollouts"
ALONE = "a row that joins a group stands beside completions of a single turn"
BEFORE = "groups are chosen by their rewards before the solutions join them"
ONE_COMPLETION = "the rewards of one completion have no variance"
AS_THEY_ARE = "it reads rewards as they are: for a baseline, a threshold, a clip or pairs"
IN_HINTS = "the log-ratios of the teacher are the only rewards"
OWN_TURNS = "rewards of turns would lose their turns"
WAITING = "updates and the sampler would wait for each other; --batch.staleness 1 is enough"
TELLS = "it tells good completions from bad"

APART: Table = {
    Q_SHARP: {"--sampling.stop-strings": "half a string may stand where it continues an answer"},
    "--rollout.partial": {
        "--batch.staleness": "a completion that continues would be older than the number says",
        "--rollout.dynamic-sampling-rounds": "both choose the groups of a batch",
        NOT_ROLLOUTS: "only scored completions go on",
        ONLY_LATEST: "its loss is wrong for older completions",
    },
    "--batch.staleness": {
        "--rollout.dynamic-sampling-rounds": "both choose the groups of a batch",
        NOT_ROLLOUTS: "only scored completions may be older",
        ONLY_LATEST: "its loss is wrong for older completions",
    },
    "--rollout.curriculum": {NOT_ROLLOUTS: "its rows have no pass rates"},
    "--sampling.thinking": {
        "--environment": NO_PHASES,
        "--agent": NO_PHASES,
        "--rollout.partial": "phases are not continued in another step",
        "--rollout.replay-routing": "phases are read anew",
        "--sampling.speculation.tokens": "contexts of phases are too long for the drafts' cache",
        NOT_ROLLOUTS: OF_ROLLOUTS,
    },
    "--rollout.replay-routing": {
        NOT_ROLLOUTS: "only of scored completions the sampler's routing is known",
        "--rollout.partial": "a completion that continues is read anew, by another policy",
        "--sampling.speculation.tokens": "drafts are read beside a completion's own tokens",
        "--environment": SINGLE_TURN,
        "--agent": SINGLE_TURN,
    },
    "--algorithm.overlong-buffer": {
        "--agent": "the limit is that of one answer, and the penalty that of an episode"
    },
    "--model.exact-sampling": {
        "--sampling.devices": "an older policy samples, so that the gap is not 0",
        "--model.float32-sums": "it sums in an order of its own, in float32 in blocks",
        "--sampling.kv-cache-dtype int8": ROUNDED,
        "--sampling.weight-dtype": ROUNDED,
        "--mesh.context": "each device holds a part of every row's keys",
        "--model.attention cudnn": "its order of sums is its own",
    },
    "--sampling.devices": {
        "--sampling.tensor-parallel train-mesh": "these devices have no training mesh"
    },
    "--sampling.weight-dtype": {
        "--model.lora.base-dtype": "the weights under the adapters are quantized already"
    },
}
"""Of every configuration."""

APART_IN_TRAINING: Table = {
    "--optimizer.continued": {
        "--model.lora.rank": "adapters begin with weights of their own, which the state is not of"
    },
    "--agent": {
        "--environment": "both answer the policy",
        "--evaluation.turns": "an agent has no turns to cut",
        NO_EPISODES: "episodes of agents have rewards; grpo learns from these",
    },
    "--algorithm.thought-weight": {"--environment": NO_PHASES, "--agent": NO_PHASES},
    OPPONENT: {"--rollout.dynamic-sampling-rounds": "it compares completions of one model"},
    "--algorithm.mask-top-p": {
        "--batch.staleness": MOVED,
        "--rollout.partial": MOVED,
        "--model.exact-sampling": "the sampler's logits are dropped",
    },
    "--algorithm.sampled-entropy": {
        "--batch.staleness": MOVED,
        "--rollout.partial": MOVED,
        "--model.exact-sampling": "the sampler's logits are divided",
    },
    "--rollout.dynamic-sampling-rounds": {
        SOLUTIONS: BEFORE,
        "--batch.group-size 1": "no group of one completion has different rewards",
    },
    ADDS_ROWS: {"--environment": ALONE, "--agent": ALONE},
    "--rollout.keep-variance-share": {
        SOLUTIONS: BEFORE,
        "--batch.group-size 1": ONE_COMPLETION,
        NOT_ROLLOUTS: "the filter leaves out prompts of online rollouts",
    },
    "--rollout.likelihood.coef": {
        "--environment": ONE_ANSWER,
        "--agent": ONE_ANSWER,
        "--rollout.dynamic-sampling-rounds": "groups are filled up before it is known",
        "--rollout.normalize-rewards": "only terms of --reward are scaled one by one",
        "--batch.group-size 1": "one completion cannot be compared",
        NOT_ROLLOUTS: OF_ROLLOUTS,
        CRITIQUE: "refinements are rewarded without it",
    },
    "--rollout.likelihood.by reference": {
        NO_REFERENCE: "it says how likely an answer is; --algorithm.kl-loss-coef 0.001 gives one"
    },
    HINT: {
        "--environment": "a hint joins the prompt of a single turn",
        "--agent": "a hint joins the prompt of a single turn",
        "--rollout.likelihood.coef": IN_HINTS,
        "--rollout.normalize-rewards": IN_HINTS,
    },
    "--rollout.constraints": {
        "--rollout.normalize-rewards": "a multiplier weighs rewards on their own scale",
        NOT_ROLLOUTS: OF_ROLLOUTS,
        RAW_RETURNS: AS_THEY_ARE,
    },
    "--rollout.normalize-rewards": {
        "--batch.group-size 1": "a group of one has no deviation",
        "--environment": OWN_TURNS,
        "--agent": OWN_TURNS,
        NOT_ROLLOUTS: OF_ROLLOUTS,
        RAW_RETURNS: AS_THEY_ARE,
    },
}
"""Of runs that are about to train; a configuration that was saved earlier can always be read."""

NEEDED: Table = {
    "--algorithm.observation-coef": {
        "--environment or --agent": "there are no observations to predict in single turns"
    },
    "--sampling.devices": {"--batch.staleness": WAITING},
    "--sampling.during-updates": {"--batch.staleness": WAITING},
    "--rollout.replay-routing": {LEARNS: "its routing is replayed where it learns"},
    "--rollout.curriculum": {
        "--reward or --environment or --agent": "its first value says which completions pass; "
        "0*NAME only measures, and a likelihood is known too late"
    },
}
"""Settings of every configuration, and those of which each needs one."""

NEEDED_IN_TRAINING: Table = {
    SAMPLED_PAIRS: {"--reward": TELLS},
    OPPOSED: {"--reward or --environment or --agent": TELLS},
    "--rollout.likelihood.form consistent": {"--reward": "right completions earn theirs once more"},
}

OF_MODELS: Table = {
    "a model of texts alone": {"--model.freeze": "it has no parts for images"},
    "a model whose images see later tokens": {
        "--model.exact-sampling": "it adds up the keys of a token in the order of the text"
    },
    "a dense model": {"--rollout.replay-routing": "there is no routing to replay"},
    "a mixture of experts": {
        "--model.exact-sampling": "a product with an expert depends on the number of its tokens",
        "--model.float32-sums": "products with experts are not summed in float32",
    },
    "a model with linear attention": {
        "--batch.share-prefixes True": "completions would begin with the state at the end of their "
        "prompt; --batch.no-share-prefixes repeats the prompt",
        "--sampling.speculation.tokens": "the state cannot take back tokens of a rejected draft",
        "--model.exact-sampling": "sums over chunks of tokens have another order than by token",
        "--mesh.context": "the state runs through all tokens of a row, on one device",
        Q_SHARP: "it looks at several next tokens, and goes back to the state before them",
    },
}
"""Settings that do not fit a kind of model. One with linear attention has a recurrent state, of
which it keeps the latest alone."""

REFERENCE_SAMPLES = {
    "--sampling.kv-cache-dtype int8": "a rounded cache would be in its log-probs",
    "--sampling.weight-dtype": "quantized weights would be in its log-probs",
}
"""Settings with which the reference's log-probs in sampling are not those that losses need."""


def is_on(config: ExperimentConfig, setting: str) -> bool:
    """Return True if a setting of a table is on, for one of the algorithms if it is theirs."""
    algorithms = [stage.algorithm for stage in config.stages]
    if setting in ALGORITHMS:
        return any(map(ALGORITHMS[setting], algorithms))
    flag, *value = setting.removeprefix("--").split(" ", 1)
    path = flag.replace("-", "_")
    settings = algorithms if path.startswith("algorithm.") else [config]
    path = " ".join((path.removeprefix("algorithm."), *value))
    return any(ranges.is_on(part, path) for part in settings)


def flag_of(setting: str) -> str:
    """Return the flag in the name of a setting."""
    return next(word for word in setting.split() if word.startswith("--"))


def require_apart(config: ExperimentConfig, table: Table) -> None:
    """Check that no two settings are on that exclude each other."""
    for setting, others in table.items():
        if is_on(config, setting):
            refuse_with(setting, config, others)


def refuse_with(setting: str, config: ExperimentConfig, others: Mapping[str, str]) -> None:
    """Check that none of the other settings is on."""
    for other, why in others.items():
        if is_on(config, other):
            flags = [flag_of(name) for name in (setting, other) if "--" in name]
            others_than_flags = [name for name in (setting, other) if "--" not in name]
            raise InputError(
                f"{setting} and {other} do not go together",
                where=", ".join(dict.fromkeys(flags)),
                why=why,
                fix=f"leave {flags[0]} out, or do without {others_than_flags[0]}"
                if others_than_flags
                else "leave one of them out",
            )


def require_needed(config: ExperimentConfig, table: Table) -> None:
    """Check that each setting of a table that is on has one of the settings that it needs."""
    for setting, needed in table.items():
        for others, why in needed.items():
            choices = others.split(" or ")
            if is_on(config, setting) and not any(is_on(config, choice) for choice in choices):
                raise InputError(
                    f"{setting} needs {others}",
                    where=", ".join(map(flag_of, (setting, *choices))),
                    why=why,
                    fix=f"use {others}, or change {flag_of(setting)}",
                )


def check_any(config: ExperimentConfig) -> None:
    """Check a configuration, whatever it is for."""
    if "" in config.sampling.stop_strings:
        raise InputError("a stop string is empty", where="--sampling.stop-strings", fix="drop it")
    check_groups(config)
    if config.rollout.partial >= config.batch.prompts:
        raise InputError(
            f"{config.rollout.partial} of {config.batch.prompts} groups cannot be carried over",
            where="--rollout.partial",
            fix=f"use 0 to {config.batch.prompts - 1}; an eighth of --batch.prompts is a beginning",
        )
    require_apart(config, APART)
    require_needed(config, NEEDED)
    if is_on(config, "--rollout.curriculum"):
        check_curriculum(config)
    limits = (config.sampling.thinking.max_tokens, config.sampling.thinking.min_tokens)
    if max(limits) >= config.sampling.max_new_tokens:
        raise InputError(
            "no token is left for the answer",
            where="--sampling.thinking, --sampling.max-new-tokens",
            why=f"completions have {config.sampling.max_new_tokens} tokens, the thought's included",
            fix="raise --sampling.max-new-tokens",
        )
    check_batch(config.batch, config.sampling, config.mesh.context)
    devices = config.sampling.tensor_parallel
    if config.model.exact_sampling and devices not in (None, "train-mesh", config.mesh.tensor):
        raise InputError(
            "exact sampling and another tensor parallelism in sampling do not go together",
            where="--model.exact-sampling, --sampling.tensor-parallel",
            why="partial sums over devices would be added in another order",
            fix=f"use --sampling.tensor-parallel {config.mesh.tensor}, that of the mesh",
        )


def check_training(config: ExperimentConfig) -> None:
    """Check a configuration that is about to train."""
    for stage in config.stages:
        check_algorithm(stage.algorithm, config.sampling)
        spec = stage.algorithm.experience
        if spec.source == "pairs" and spec.reference_log_probs and spec.sampled_by == "reference":
            refuse_with("completions of the reference", config, REFERENCE_SAMPLES)
            if config.sampling.temperature != 1:
                raise InputError(
                    f"the reference is sampled at temperature {config.sampling.temperature}",
                    where="--sampling.temperature",
                    why="the loss is at 1, and compares with its log-probs as they were then",
                    fix="use 1.0",
                )
    check_pairs(config)
    check_mask(config)
    require_apart(config, APART_IN_TRAINING)
    require_needed(config, NEEDED_IN_TRAINING)
    check_variance_filter(config)
    check_likelihood(config)
    names = terms.names_of(registry.displayed(config.reward_terms))
    constraints.parse_all(config.rollout.constraints, names)
    if config.rollout.normalize_rewards and len(config.reward) < 2:
        raise InputError(
            "there is one reward to normalize, or none",
            where="--rollout.normalize-rewards, --reward",
            fix="name several rewards, or scale the advantages of one",
        )


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

    Raises InputError if a name is missing, stands twice, or would be that of other metrics; `tasks`
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


def check_groups(config: ExperimentConfig) -> None:
    """Check that the completions of a prompt differ, if an algorithm compares them."""
    smallest = max(stage.algorithm.experience.smallest_group for stage in config.stages)
    why = "completions of one prompt are compared with each other"
    if config.batch.group_size < smallest:
        raise InputError(
            f"a group of {config.batch.group_size} completion teaches nothing: its advantage is "
            "always 0",
            where="--batch.group-size",
            why=why,
            fix="use at least 2; 8 is usual",
        )
    if smallest > 1 and config.sampling.temperature <= 0:
        raise InputError(
            f"sampling temperature {config.sampling.temperature} makes all completions of a prompt "
            "equal",
            where="--sampling.temperature",
            why=why,
            fix="use 1.0",
        )


def check_curriculum(config: ExperimentConfig) -> None:
    """Check that rows can be chosen, and start, as the curriculum says."""
    curriculum = config.rollout.curriculum
    where = "--rollout.curriculum"
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


def _require_room(batch: BatchConfig, tokens: int, texts: str, count: str) -> None:
    """Check that packed rows hold so many tokens, those of texts that stay together."""
    if batch.row_length < tokens:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot hold {texts}",
            where="--batch.row-length",
            why=f"they may have {count} tokens, and stay together",
            fix="raise --batch.row-length, or lower --sampling.max-prompt-tokens or "
            "--sampling.max-new-tokens",
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
    prompt = sampling.max_prompt_tokens
    completion = sampling.max_new_tokens
    count = f"{prompt} + {completion}"
    _require_room(batch, prompt + completion, "a prompt with a completion", count)
    unit = 256 * context_devices
    if context_devices > 1 and batch.row_length % unit:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot be cut evenly over "
            f"{context_devices} devices",
            where="--batch.row-length, --mesh.context",
            why="each takes a stretch from the front and one from the end, of blocks of 128 tokens",
            fix=f"--batch.row-length {-(-batch.row_length // unit) * unit}",
        )


def check_algorithm(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> None:
    """Check that the sampling settings suit the losses of an algorithm."""
    teacher = algorithm.roles.get("teacher")
    if teacher is not None and teacher.path == "":
        raise InputError(
            "no teacher given",
            where="--algorithm.teacher",
            fix="give a Hugging Face directory, a hub id or the model folder of a run",
        )
    spec = algorithm.experience
    if spec.served or (
        teacher is not None and str(teacher.path).startswith(("http://", "https://"))
    ):
        wings.MODULES["served_teacher"].check(algorithm, sampling.temperature)
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
    if isinstance(algorithm, SamplerCorrection):
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")
        is_plain = not any(ranges.is_on(sampling, name) for name in names)
        if algorithm.compares and not algorithm.recomputes and is_plain:
            raise InputError(
                "every importance weight would be 1, and nothing would be rejected",
                where="--algorithm.old-log-probs",
                why="the sampler's log-probs are compared with themselves",
                fix="leave it out, and the old log-probs are recomputed",
            )
    if (
        isinstance(algorithm, ReturnSettings)
        and algorithm.overlong_buffer > sampling.max_new_tokens
    ):
        raise InputError(
            f"an overlong buffer of {algorithm.overlong_buffer} tokens before a limit of "
            f"{sampling.max_new_tokens}",
            where="--algorithm.overlong-buffer, --sampling.max-new-tokens",
            why="even an empty completion would be penalized for its length",
            fix=f"use at most {sampling.max_new_tokens}; DAPO uses a fifth of the limit",
        )


def check_pairs(config: ExperimentConfig) -> None:
    """Check that pairs of sampled completions fit a packed row."""
    batch = config.batch
    sampling = config.sampling
    specs = [stage.algorithm.experience for stage in config.stages]
    sampled = [spec for spec in specs if spec.source == "pairs" and spec.sampled_by is not None]
    if not all(spec.graded for spec in sampled):
        prompts = 1 if batch.share_prefixes else 2
        count = f"{prompts} x {sampling.max_prompt_tokens} + 2 x {sampling.max_new_tokens}"
        tokens = prompts * sampling.max_prompt_tokens + 2 * sampling.max_new_tokens
        _require_room(batch, tokens, "a prompt with both its completions", count)
    if is_on(config, OPPONENT) and batch.group_size % 2:
        raise InputError(
            f"{batch.group_size} completions of a prompt are not half the policy's",
            where="--batch.group-size",
            why="half of them are the policy's and half the reference's",
            fix=f"use --batch.group-size {batch.group_size + 1}",
        )


def check_mask(config: ExperimentConfig) -> None:
    """Check that a batch is learned with the mask with which it was sampled."""
    updates = config.batch.num_minibatches * config.batch.ppo_epochs
    nuclei = [stage.algorithm.experience.nucleus for stage in config.stages]
    if any(nucleus is not None and nucleus.every % updates for nucleus in nuclei):
        raise InputError(
            f"the mask would move within a batch of {updates} updates",
            where="--algorithm.mask-every",
            why="a batch is learned with the mask with which it was sampled",
            fix=f"use a multiple of {updates}",
        )


def check_variance_filter(config: ExperimentConfig) -> None:
    """Check that the filter by variance leaves enough groups."""
    batch = config.batch
    kept = num_kept(batch.prompts, config.rollout.keep_variance_share)
    if kept % batch.num_minibatches:
        raise InputError(
            f"{kept} of {batch.prompts} prompts are kept, which cannot be cut into "
            f"{batch.num_minibatches} equal minibatches",
            where="--rollout.keep-variance-share, --batch.num-minibatches",
            fix="change the share, --batch.prompts or --batch.num-minibatches",
        )


def check_likelihood(config: ExperimentConfig) -> None:
    """Check that the likelihood of the reference answer can be a reward."""
    likelihood = config.rollout.likelihood
    if not likelihood.coef:
        return
    if not likelihood.mark:
        raise InputError(
            "the mark is empty",
            where="--rollout.likelihood.mark",
            fix="use the text that stands before answers, e.g. '####'",
        )
    if "likelihood" in config.reward_names:
        raise InputError(
            "a reward has the name of the likelihood",
            where="--rollout.likelihood.coef, --reward",
            fix="give the function another name",
        )
