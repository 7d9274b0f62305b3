"""Configuration of a run's data, batches and rollouts.

The sources of experience read these values, and `commands.config` composes them into an experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tpu_rl import ranges, sampler
from tpu_rl.ranges import Conflicts, Count, CountOrNone, In, Needs, NotNegative, Positive, Share
from tpu_rl.sampler import Speculation, Thinking
from tpu_rl.sampler.config import Temperature, TensorParallel
from tpu_rl.tokenizers import AssistantTurns, Tokenizer


@dataclass(frozen=True)
class FlipConfig(ranges.Checked):
    """Training rows whose labels are turned around, to see what wrong labels do."""

    FLAG = "--data.flip"
    share: Share = 0.0
    """Turn around this share of the labels: chosen and rejected, `label`, or numbers in `answer`.
    Held-out rows keep theirs. 0 is off."""
    where: Annotated[str, Needs("share")] = ""
    """Only of rows with this text in their column `column`; capitals do not matter."""
    column: Annotated[str, Needs("share")] = "prompt"
    """The column with that text, such as one that names the topic."""
    seed: Annotated[int, Needs("share")] = 0
    """Decides with the row alone which labels these are; --seed does not."""


FLIPPED = "label_flipped"
"""Column that is true in rows whose labels were turned around."""


DataFormat = Literal["plain", "code", "gsm8k", "gsm8k_solutions"]
"""The columns of files of rows; see `FileData.format`."""


@dataclass(frozen=True)
class FileData:
    """Rows of files or of a dataset."""

    path: str | None = None
    """Training rows: files or patterns, separated by commas (.jsonl, .json, .csv, .parquet, also
    .gz), a folder of datasets.save_to_disk, or a name OWNER/NAME of the hub. Columns: `prompt`
    (text or messages), `messages`, or `prompt` and `completion`, and any others; for preferences
    `prompt, chosen, rejected`, or `prompt, completion, label` if each completion is graded by
    itself."""
    weights: tuple[float, ...] = ()
    """Shares of the files that commas separate in `path`, one number each, as in 0.7 0.3. Each file
    then has epochs of its own. The default: every row counts alike."""
    evaluation_path: str | None = None
    """Held-out rows. Without it, the last rows of `path` are held out and never trained on."""
    split: str | None = None
    """The split of a saved dataset or a dataset of the hub. The default is `train`."""
    evaluation_split: str | None = None
    """The split of `evaluation_path`, in the same way."""
    config: str | None = None
    """The configuration of a dataset of the hub, such as `main` of openai/gsm8k."""
    format: DataFormat = "plain"
    """code: also a column `tests`, for the reward python_tests. gsm8k: columns `question` and
    `answer`, as published. gsm8k_solutions: example_model_solutions.jsonl, whose right and wrong
    solutions of a problem make pairs; the last problems, at most a quarter, are held out."""
    instruction: str = ""
    """Text to append to every prompt, or to the last user message of a conversation."""
    templates: tuple[str, ...] = ()
    """Texts with {prompt} in them. Each row's prompt is written into one of them; which one depends
    on the prompt alone. The instruction follows it."""
    evaluation_templates: tuple[str, ...] = ()
    """The same for held-out rows, as templates that no training row has. The default: those of
    training rows."""
    decontaminate: int = 0
    """Drop training rows whose prompt has so many words in a row that a held-out prompt has too; of
    a shorter prompt, all words. 13 is usual; 0 drops none."""
    flip: FlipConfig = FlipConfig()
    """Wrong labels, as a control."""
    chat: Literal["auto", "always", "never"] = "auto"
    """The use of the chat template for prompts that are plain text. auto: a prompt becomes the
    user's message if the tokenizer has a chat template. always: the same, but an error without
    one. never: a prompt is text to continue. Messages are always rendered by the template."""
    system: str | None = None
    """System message that begins every conversation that has none."""
    columns: tuple[str, ...] = ()
    """Columns under other names, as NAME=COLUMN: prompt=question completion=answer."""
    step_separator: str = "\n"
    """Text between the steps of a solution (`completions` with `labels`). It is added to rows whose
    steps have no white space between them."""
    assistant_turns: AssistantTurns = "all"
    """The assistant's messages to learn from in the column `messages` and in completions of
    several messages: all of them, or the last one."""
    min_pixels: int | None = None
    """The least pixels that an image is scaled to, for models that read images of any size
    (Qwen's). The default is that of the model's preprocessor_config.json; the saved model has the
    new one."""
    max_pixels: int | None = None
    """The most pixels, in the same way. Fewer make shorter prompts."""


DataConfig = Any
"""The data of a run: the settings of any task in `wings.TASKS`, or `FileData`."""


@dataclass(frozen=True)
class BatchConfig:
    prompts: Count = 32
    """Prompts, or demonstrations, per step of the run."""
    group_size: int = 8
    """Completions per prompt; 1 for demonstrations."""
    staleness: CountOrNone = 0
    """Sample each batch so many steps before the step that learns from it, while other processes
    compute the rewards of the batches before it. 0: rollouts are on-policy."""
    num_minibatches: Count = 1
    """Optimizer steps per pass over the batch."""
    ppo_epochs: Count = 1
    """Passes over the batch."""
    row_length: int = 512
    """Tokens per packed row."""
    micro_batch_rows: CountOrNone = 8
    """Packed rows in memory at once, over all devices. It is rounded up to a number that the
    devices can share. 0: 4, or a thirty-second of a step of full length if that is more, or as
    many as fit in memory if that is less; where the memory of a device is not known, as on CPUs, 4.
    The run records its choice, and goes on with it."""
    whole_products: Literal["auto", "on", "off"] = "auto"
    """TPU v5e and v6e: multiply by whole weights in training, gathered from the devices that share
    them. off: XLA cuts large products in windows, which takes 1 to 2 GiB less of a device's memory,
    more time by the compiler's estimate, and rounds sums twice. auto: on if the update fits by
    estimate."""
    whole_logits: Literal["auto", "on", "off"] = "auto"
    """Keep the logits of a micro-batch for the backward pass, and do not compute them again in
    parts. auto: on if a TPU chip works alone and the update fits by estimate."""
    share_prefixes: bool = True
    """Store the prompt of a group, and whatever else its completions share, once in a packed row.
    Models with a recurrent state (Qwen3.5) need False, which repeats it for each completion."""

    @property
    def has_whole_products(self) -> bool:
        """True unless `whole_products` is off, or was found too large."""
        return self.whole_products != "off"

    @property
    def rows_at_once(self) -> int:
        """`micro_batch_rows`, or 4 if nothing has chosen it."""
        return self.micro_batch_rows or 4


@dataclass(frozen=True)
class LikelihoodConfig:
    """The likelihood of the reference answer as a reward (tpu_rl/experience/likelihood.py)."""

    coef: NotNegative = 0.0
    """Add this x the reward. 0 is off. With it, `--reward` may be left out, or only measure."""
    form: Literal["gain", "spread", "consistent"] = "gain"
    """gain: how much likelier the answer is after the completion than without one, from 0 to 1
    (RLPR). spread: the gain in log-prob, over the answer's tokens that depend most on the
    completion (R3). consistent: among right completions, those that make the answer at least as
    likely as their mean earn their reward once more (GRPO-CARE)."""
    by: Literal["policy", "reference"] = "policy"
    """The model that says how likely the answer is. GRPO-CARE has a slow reference:
    --algorithm.reference-reset-every and reference-reset-share move it."""
    column: str = "answer"
    """Column of the data rows that holds the answer, as a text."""
    mark: str = "####"
    """Text before the answer in a completion, with its space if it has one."""


@dataclass(frozen=True)
class CurriculumConfig:
    """The choice of rows by how often their completions passed, and starts from solutions. A
    completion passes if its first reward is above 0.5."""

    pass_rate: tuple[float, float] = (0.0, 1.0)
    """Draw rows of which this share of completions passed when they were last sampled, both ends
    included, and rows that were not sampled yet."""
    impact: Annotated[float, In("(-inf, 1]")] | None = None
    """Pass over rows whose learning impact (LIM, at most 1) is lower; LIMR uses 0.6. It says how
    closely a row's pass rates follow the mean of all rows, from its second time on."""
    refresh: CountOrNone = 4
    """Sample a row again that has been passed over so many times; 0: never."""
    start: tuple[float, float] = (0.0, 0.0)
    """Let prompts end with the first part of the row's solution: this share of it at first, falling
    to the second number."""
    start_batches: int = 0
    """Batches until that share is the second number."""
    hints: bool = False
    """Let a row whose completions all fail come again in the next batch, with the first quarter of
    its solution at the end of its prompt, then half, then three quarters (GHPO)."""
    solution_column: str = "solution"
    """Column of the data rows that holds the solution, as a text. Its last part is never shown."""
    separator: str = "\n"
    """Text at which a solution may be cut; empty: between any two characters."""
    start_text: str = ""
    """Text between the prompt and the part of the solution. In a conversation both end the last
    message."""


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of when rollouts are sampled, and which of them a step learns from."""

    dynamic_sampling_rounds: int = 0
    """Dynamic sampling (DAPO): the largest number of further batches that are sampled to replace
    groups whose rewards are all equal. 0 turns it off."""
    dynamic_sampling_size: Annotated[
        Literal["batch", "needed"], Needs("dynamic_sampling_rounds", when="needed")
    ] = "batch"
    """Prompts of such a further batch: as many as in a batch, or a quarter, a half or all of that,
    whichever holds as many as the share of informative groups so far says are needed."""
    keep_variance_share: Annotated[float, In("(0, 1]")] = 1.0
    """Learn only from this share of the prompts, those whose rewards have the largest standard
    deviations (StarPO-S); 1 keeps all. The other prompts count in metrics alone."""
    normalize_rewards: bool = False
    """Scale each reward by its mean and standard deviation in the group, before the weighted sum,
    so that no reward drowns another (GDPO, with --algorithm.advantages batch). Metrics show the
    rewards as they are."""
    likelihood: LikelihoodConfig = LikelihoodConfig()
    """The likelihood of the reference answer as a reward."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """The choice of rows by their pass rates, and starts from solutions."""
    constraints: tuple[str, ...] = ()
    """Limits of the means of rewards and lengths, NAME<=LIMIT or NAME>=LIMIT, which Lagrange
    multipliers hold: "length<=200" (sampled tokens), "repetition>=-0.1" (its values are below 0)
    with --reward gsm8k "0*repetition"."""
    constraint_rate: Positive = 0.01
    """Change of a multiplier per batch and unit beyond the limit. A length is in tokens: 0.0001 to
    0.001 suits it."""
    partial: CountOrNone = 0
    """Partial rollouts: the number of groups that may be unfinished when a batch is complete. They
    continue in the next step. 0 waits for every completion. The sampler checks every
    --sampling.host-sync-steps tokens; of episodes, rounds of turns are counted."""
    replay_routing: bool = False
    """Mixture of experts: let the policy's experts in the update, and where it computes log-probs,
    be those that the sampler's router chose for the same token (R3). It lowers the sampler-trainer
    gap."""


@dataclass(frozen=True)
class SamplingConfig:
    max_prompt_tokens: int = 256
    max_new_tokens: Count = 256
    """Length limit of a completion. With --environment it counts all turns of an episode, and what
    the environment answers. With --agent it is that of one answer, and conversations have this and
    `max_prompt_tokens` together."""
    max_turns: Count = 8
    """Turns of the policy in an episode. Only with --environment; with --agent, the calls of the
    policy that an episode may make."""
    max_observation_tokens: Count = 256
    """Tokens of one answer of the environment. See `long_observations`."""
    long_observations: Literal["cut", "refuse"] = "cut"
    """Longer answers are cut, and end with "...[cut]"; or they are faults of their episodes."""
    temperature: Temperature = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, In("(0, 1]")] | None = None
    min_p: Share | None = None
    max_num_seqs: CountOrNone = 0
    """Completions decoded at once. When one ends, the next takes its slot. 0: as many as an
    evaluation has, or a step, or half of that, or a quarter ..., the first number that fits beside
    the train state; where the memory of a device is not known, as on CPUs, 256."""
    repetition_penalty: Positive = 1.0
    """Divide positive logits of tokens that are in the text already, and multiply negative ones.
    Evaluation ignores it, as it ignores logit_bias."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number to add to its logit; -inf forbids a token."""
    stop_strings: tuple[str, ...] = ()
    """End a completion with the token that completes one of these strings in its text."""
    kv_cache_dtype: Literal["computed", "int8"] = "computed"
    """The type of cached keys and values: the type that they are computed in, or int8 with a scale
    per token and head, which takes half of bfloat16's memory. With int8, the sampler's log-probs
    differ from the trainer's: policy/log_prob_gap_mean says by how much, and
    --algorithm.importance-sampling-cap corrects for it. Evaluation never rounds."""
    weight_dtype: Literal["computed", "int8", "float8_e4m3fn"] = "computed"
    """The type of the weights that sample: that of the computation, or eight bits with a scale per
    output for the matrices of attention, MLPs and experts. A decode step then reads half as much of
    them as in bfloat16. Training, evaluation and saved models never round; the sampler's log-probs
    differ from the trainer's as with kv_cache_dtype, and the same corrections apply."""
    tensor_parallel: TensorParallel | None = None
    """Devices that share heads, widths and vocabulary during sampling, whatever the run's mesh is.
    The other devices share rows; all devices share the experts of a mixture if they divide their
    number. Decoding then gathers no weights. By default the smallest number is chosen whose weights
    and cache fit; where the memory of a device is not known, as on CPUs, train-mesh. train-mesh:
    sample on the run's mesh, and gather weights that it shards over fsdp for every token."""
    devices: CountOrNone = 0
    """Devices that only sample, the last ones: the next batch is sampled on them during the update
    on the others, with --batch.staleness of at least 1. The weights are copied to them before each
    update. 0: all devices sample, and then all of them learn."""
    during_updates: Annotated[bool, Conflicts("devices", why="those sample during updates")] = False
    """One device alone: sample the --batch.staleness batches that wait for their step and the next
    one at the same time, while the device learns. Tools and agents then answer during updates. Each
    batch has a copy of the weights and a cache."""
    host_sync_steps: Count = 128
    """Decode steps between two visits of the host, which starts the rewards of complete groups and
    looks for stop strings."""
    speculation: Speculation = Speculation()
    """Sample the same completions in fewer steps. Evaluation and Q# decode without it."""
    thinking: Thinking = Thinking()
    """The length of thoughts, in training and evaluation, and the sampling of answers, in training
    alone."""

    @property
    def slots(self) -> int:
        """`max_num_seqs`, or 256 if nothing has chosen it."""
        return self.max_num_seqs or 256


def sampler_config(
    sampling: SamplingConfig, tokenizer: Tokenizer, group_size: int
) -> sampler.SamplerConfig:
    """Return the sampler's settings for groups of completions, without speculation."""
    return sampler.SamplerConfig(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_ids=tokenizer.eos_ids,
        samples_per_prompt=group_size,
        pad_id=tokenizer.pad_id,
        max_num_seqs=sampling.slots,
        prompt_length=sampling.max_prompt_tokens,
        segments=sampler.SegmentConfig(steps=sampling.host_sync_steps),
    )
