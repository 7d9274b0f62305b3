"""The configuration of an experiment: one frozen value.

A preset makes it, flags change it, and the run folder keeps it as config.yaml. Each part is a small
dataclass beside the code that reads it, or here if only commands do. Nothing here touches an
accelerator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import math
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
import yaml

from tpu_rl import lazy, ranges, run_files, untrusted_files, wings
from tpu_rl.algos import ALGORITHMS, AlgorithmConfig, plugins
from tpu_rl.commands.checks import config_checks
from tpu_rl.commands.flags import flag_names, help_text, yaml_flags
from tpu_rl.environments.pool import EnvironmentLimits
from tpu_rl.errors import (
    DamagedDataError,
    InputError,
    missing_file,
    reported,
    typed_command,
    unknown_name,
)
from tpu_rl.experience.config import (
    BatchConfig,
    DataConfig,
    FileData,
    RolloutConfig,
    SamplingConfig,
)
from tpu_rl.models import LoraConfig
from tpu_rl.plain_values import fields_of, flatten, from_dict, merged, to_dict
from tpu_rl.rewards import RewardTerm, terms
from tpu_rl.rewards.worker_pool import RewardLimits
from tpu_rl.runtime import profiler
from tpu_rl.runtime.watchdog import WatchdogConfig
from tpu_rl.tokenizers import TokenizerConfig
from tpu_rl.train.optimizers import OptimizerConfig

BUILTIN = "builtin:"
PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""The models that come with the package; builtin:NAME is one of them."""
DEFAULT_PRESET = "arithmetic_grpo"
ALGORITHM_FLAG = "--algorithm"
CONFIG_FLAG = "--config"
EPOCHS_FLAG = "--epochs"
EXAMPLES = {
    ALGORITHM_FLAG: "my_algorithm.py:factory",
    CONFIG_FLAG: "settings.yaml",
    EPOCHS_FLAG: "3",
    "--steps": "100",
}
"""Flags of the configuration as a whole -> an example of a value."""


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = None
    """Hugging Face directory with safetensors, a hub id (local cache first), or builtin:NAME for a
    model that comes with the package."""
    random_init: bool = False
    """Take only config.json and the tokenizer from `path`, with random weights, to train from
    scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type that the model computes in."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the weights. Adapters and the optimizer's moments are always float32. In bfloat16
    an update of less than a 256th of a weight is lost, so use it only for weights that do not
    train, such as those under adapters."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """xla: matrix products over the tiles of a packed row that see each other. auto: on TPUs, if
    128 divides the length of packed rows, a Pallas kernel that never stores a layer's scores; on
    NVIDIA GPUs in bfloat16, cuDNN's kernel for training and log-probs, and in any type a Pallas
    kernel for decode steps, each if a trial gives what xla gives; otherwise xla. cudnn: the same,
    but an error where cuDNN cannot be used."""
    exact_sampling: bool = False
    """Let the update compute the very bits that the sampler did, so that the sampler-trainer gap is
    0 at the first update of a batch, in bfloat16 too. It costs speed; see
    docs/reference/attention.md."""
    float32_sums: bool = False
    """Sum products with weights, and their gradients, in float32, also over devices, and round
    once. Without it a bfloat16 model sends and adds partial sums in bfloat16. It costs links and
    memory; see docs/benchmarks/exactness.md."""
    remat: Literal["full", "save-dots", "none"] = "full"
    """The part of a layer that the backward pass computes again, to save memory. full: everything.
    save-dots: everything but the results of products with weights, and attention's; experts are
    computed again. none: nothing, but experts that several devices share."""
    gradient_barrier: bool = False
    """Write the gradients of an MLP's gate and up to memory before the products that read them,
    which XLA otherwise may compute again for each tile of a product. launch/plan.py --search tries
    it; see docs/benchmarks/scaling.md."""
    lora: LoraConfig = LoraConfig()
    images: bool = False
    """Read images with a Gemma 3 or 4 that has a tower, a text model otherwise. Models of other
    families that read images (LLaVA, InternVL, Idefics3, SmolVLM) always do."""
    freeze: tuple[Literal["vision", "projector"], ...] = ()
    """Parts of a model that reads images which do not train. vision: the tower. projector: what
    makes its states as wide as the text's. With adapters neither trains."""
    router_balance: float = 0.0
    """Mixture of experts: the weight of the load-balance loss. Published models come balanced, and
    their configurations set none for fine-tuning (output_router_logits is false); pretraining uses
    0.001 to 0.01."""


@dataclass(frozen=True)
class EvaluationConfig:
    rows: int = 500
    """Number of held-out problems; 0 turns evaluation off."""
    interval: ranges.Count = 10
    """Steps between evaluations. There is always one before the first and one after the last step.
    """
    reward: str | None = None
    """The reward that says what is correct, or grades. The default is the first --reward."""
    metrics: tuple[str, ...] = ()
    """Further rewards to measure on the same completions. Those of --reward always are."""
    turns: tuple[int, ...] = ()
    """With --environment: evaluate also with at most so many turns, as in --evaluation.turns 1 2,
    when the run begins and when it ends."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness to measure, too, or YAML files of one task each, with at most
    --evaluation.rows examples of each; needs the extra [lm-eval]."""
    apply_chat_template: Annotated[bool, ranges.Needs("tasks", why="other data use it anyway")] = (
        False
    )
    """Ask these tasks by conversations, few-shot examples as earlier turns. Otherwise the model
    continues texts."""
    greedy: bool = True
    """Before and after the run, also evaluate the most likely completions."""
    sets: tuple[str, ...] = ()
    """Further held-out rows, NAME=DATA, as in --evaluation.sets hard=hard.jsonl facts=facts.jsonl,
    with metrics of their own: eval/hard/reward. DATA is as in --data.path, and has the columns of
    the training rows; of each set --evaluation.rows count."""

    @property
    def named_sets(self) -> dict[str, str]:
        """Name -> data of each of `sets`."""
        return config_checks.named_sets(self.sets, self.tasks)


@dataclass(frozen=True)
class SamplesConfig:
    interval: ranges.Count = 1
    """Steps between those whose completions samples.jsonl keeps. Step 1 is one of them."""
    max_per_step: Annotated[ranges.CountOrNone, ranges.Conflicts("show", when=0)] = 32
    """Completions that it keeps of such a step: whole groups, evenly chosen over the batch; 0 keeps
    none."""
    show: ranges.CountOrNone = 0
    """Steps between those whose best and worst kept completion the terminal shows; 0 shows none."""


@dataclass(frozen=True)
class CheckpointConfig:
    interval: ranges.Count = 20
    """Steps between checkpoints. A stage's last step has one, too."""


@dataclass(frozen=True)
class MeshConfig:
    data: int = 1
    fsdp: int = -1
    """-1 takes all devices that the other axes leave. Only on whole cubes of v4 and v5p, such as
    v5p:4x4x4, it leaves half of them to `data`, because weights sharded over a whole cube are
    gathered by slower collectives, if `data` and `tensor` are 1."""
    tensor: int = 1
    expert: int = -1
    """Devices that share the experts of a mixture; for everything else this axis adds to fsdp. -1:
    on TPUs, if no other axis is given, the number with the fewest bytes over links; otherwise 1."""
    context: int = 1
    """Devices that share the tokens of each packed row, if a row is too long for one device."""


@dataclass(frozen=True)
class Plateau:
    """A metric that stops rising."""

    metric: str
    over: int = 8
    """Steps per mean: the mean over the last ones is compared with the mean over as many before."""
    gain: float = 0.02
    """The smallest rise of the mean with which the phase continues."""


class StopRule(NamedTuple):
    """A bound of the mean of a metric."""

    metric: str
    is_upper: bool
    limit: float


BY_METRIC = ranges.Needs("metric", why="it says which evaluation is better, as eval/accuracy does")


@dataclass(frozen=True)
class StopConfig:
    """Ends of the main algorithm before its last step. The run then finishes as usual."""

    metric: Annotated[str, ranges.Needs("patience", "best", why="it ends and chooses nothing")] = ""
    """The held-out metric that --stop.patience and --stop.best look at, such as eval/accuracy."""
    goal: Literal["highest", "lowest"] = "highest"
    """The better values of --stop.metric."""
    patience: Annotated[ranges.CountOrNone, BY_METRIC] = 0
    """End the run after so many evaluations in a row without a better value; 0 never does."""
    best: Annotated[bool, BY_METRIC] = False
    """The run's model is that of the evaluation with the best value, not that of the last step."""
    when: tuple[str, ...] = ()
    """End the run when the mean of a metric leaves its bound: METRIC>NUMBER or METRIC<NUMBER, as in
    'policy/kl_reference>0.5' 'reward/std<0.01' 'rollout/truncated>0.5'. Quote them for the
    shell."""
    over: ranges.Count = 8
    """Steps of the mean of --stop.when; at evaluations' metrics, so many evaluations."""

    def __post_init__(self):
        ranges.check(self, "--stop")
        _ = self.rules

    @property
    def rules(self) -> tuple[StopRule, ...]:
        """The bounds of `when`."""
        rules = []
        for text in self.when:
            match = re.fullmatch(r"([^\s<>]+)\s*([<>])\s*(\S+)", text.strip())
            try:
                limit = float(match[3]) if match else math.nan
            except ValueError:
                limit = math.nan
            if match is None or not math.isfinite(limit):
                raise InputError(
                    f"{text!r} is no bound of a metric",
                    where="--stop.when",
                    fix="as in 'reward/std<0.01'",
                )
            rules.append(StopRule(match[1], match[2] == ">", limit))
        return tuple(rules)


@dataclass(frozen=True)
class Phase:
    """A part of a run before its main `algorithm`: value pretraining, or a round of Q#."""

    algorithm: AlgorithmConfig
    until: int
    """The last step of the run that belongs to the phase."""
    reset_roles: tuple[str, ...] = ()
    """Roles to reset to their initial weights at the end of the phase. The next phase's source is
    made first, from the trained weights."""
    ends_when_flat: Plateau | None = None
    """End the phase before `until` when this is flat. The next phase begins earlier; the number of
    steps of the run stays the same."""


class Stage(NamedTuple):
    """A phase, or the main algorithm, with its place in the run."""

    index: int
    algorithm: AlgorithmConfig
    first: int
    """The first step of the run that belongs to it."""
    last: int
    reset_roles: tuple[str, ...]
    """Roles that begin it with their initial weights."""
    ends_when_flat: Plateau | None


@dataclass(frozen=True)
class ExperimentConfig:
    algorithm: AlgorithmConfig
    data: DataConfig
    model: ModelConfig = ModelConfig()
    reward: tuple[str, ...] = ()
    """Terms [WEIGHT*]NAME[?OTHER>NUMBER], which are added up. NAME is a built-in reward,
    FILE.py:function, or the directory of a reward model. With ?OTHER>NUMBER (or <) the term is 0
    where the reward OTHER is not above (below) the number. Quote *, ?, < and > for the shell."""
    reward_limits: RewardLimits = RewardLimits()
    environment: str = ""
    """What answers the policy, over several turns: FILE.py:Class with the methods of TRL's
    environment_factory or of a text game, a built-in environment, or FAMILY:NAME. A class with
    `get_reward` needs no --reward."""
    environment_limits: EnvironmentLimits = EnvironmentLimits()
    agent: str = ""
    """FILE.py:FUNCTION, an async function of (row, base_url, api_key) that talks to the policy over
    HTTP, as to OpenAI's servers. Each completion is a call of it. What it returns is the reward;
    None leaves that to --reward."""
    agent_seconds: ranges.Positive = 600.0
    """Time for one call of the agent. Its workers are those of --environment-limits."""
    allow_unsandboxed_code: bool = False
    """Run model-written programs (reward python_tests) unconfined if the kernel cannot confine
    them."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    samples: SamplesConfig = SamplesConfig()
    mesh: MeshConfig = field(default_factory=MeshConfig)
    phases: tuple[Phase, ...] = ()
    """The phases that the run begins with. `algorithm` takes the steps after the phases."""
    steps: ranges.Count = 100
    seed: int = 0
    run_dir: str = ""
    """The folder of the run; runs/PRESET if empty. The same command on the same folder continues
    where the run stopped."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    wandb: bool = False
    """Send metrics and some completions to Weights & Biases. WANDB_PROJECT and WANDB_NAME name the
    project and the run."""
    trackio: bool = False
    """Send the same to trackio. TRACKIO_PROJECT and TRACKIO_NAME name the project and the run."""
    mlflow: bool = False
    """Send the same to MLflow. MLFLOW_TRACKING_URI says where."""
    watchdog: WatchdogConfig = WatchdogConfig()
    debug_nans: bool = False
    """Stop at the first step with a non-finite number, and name the line that produced it."""
    profile: str = ""
    """FROM:TO, the steps whose trace is written to RUN_DIR/profile."""
    dry_run: bool = False
    """Check everything that the run reads before its first step, print what would run, and stop."""
    accept_dataset_change: bool = False
    """Continue with data that differ from those that the run began with. The run folder keeps a
    record of the change."""

    @property
    def evaluation_reward(self) -> str | None:
        """The reward that says what is correct in evaluations; None if there is none."""
        others = (*self.reward_names, *self.evaluation.metrics)
        return self.evaluation.reward or next(iter(others), None)

    @property
    def evaluation_rewards(self) -> list[str]:
        """The names of all rewards that evaluations measure, `evaluation_reward` first."""
        names = (self.evaluation_reward, *self.reward_names, *self.evaluation.metrics)
        return list(dict.fromkeys(filter(None, names)))

    @property
    def reward_terms(self) -> tuple[RewardTerm, ...]:
        """The terms of the total reward, as `reward` describes them."""
        return terms.parse_all(self.reward, is_whole=not self.rollout.likelihood.coef)

    @property
    def reward_names(self) -> list[str]:
        """The names of all rewards of terms and gates, each once."""
        return terms.names_of(self.reward_terms)

    @property
    def batches_at_once(self) -> int:
        """The batches that are sampled at the same time."""
        return self.batch.staleness + 1 if self.sampling.during_updates else 1

    @property
    def converses(self) -> bool:
        """True if an environment or an agent talks to the policy."""
        return bool(self.environment or self.agent)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The phases, then `algorithm`, with their steps if no phase ends early."""
        return self.stages_ended(())

    def stages_ended(self, early: Sequence[int]) -> tuple[Stage, ...]:
        """Return the stages of a run in which phases ended early, at these steps.

        The next stage begins earlier, and `algorithm` takes the steps that are left.
        """
        stages = []
        first = 1
        reset_roles: tuple[str, ...] = ()
        for index, phase in enumerate((*self.phases, Phase(self.algorithm, self.steps))):
            last = next((step for step in early if first <= step < phase.until), phase.until)
            stages.append(
                Stage(index, phase.algorithm, first, last, reset_roles, phase.ends_when_flat)
            )
            first = last + 1
            reset_roles = phase.reset_roles
        return tuple(stages)

    def __post_init__(self):
        ranges.check_all(self)
        _ = self.reward_terms
        _ = self.evaluation.named_sets
        config_checks.check_run_dir(self.run_dir)
        profiler.require_within_run(self.profile, self.steps)
        config_checks.check_phases([phase.until for phase in self.phases], self.steps)
        config_checks.check_any(self)

    def require_fit(self, kind: str) -> None:
        """Raise InputError if a setting does not fit a kind of model of `OF_MODELS`."""
        config_checks.refuse_with(kind, self, config_checks.OF_MODELS[kind])


# --- command line ---


def parse(argv: list[str]) -> ExperimentConfig:
    """Return the configuration of [PRESET] [--config FILE.yaml] [--algorithm NAME|FILE.py:FACTORY]
    [--epochs E] [--flags].

    PRESET may be the config.yaml of an earlier run. For the file see `yaml_flags`.

    Raises:
        InputError: if flags do not go together.
        SystemExit: after printing the help that a flag asks for.
    """
    has_preset = bool(argv) and not argv[0].startswith("-")
    chosen = argv[0] if has_preset else DEFAULT_PRESET
    flags = argv[1:] if has_preset else argv
    file, flags = take_flag(flags, CONFIG_FLAG)
    if file is not None:
        file_preset, file_flags = yaml_flags.read(Path(file))
        chosen = chosen if has_preset else file_preset or chosen
        flags = [*file_flags, *flags]
    default = load_file(Path(chosen)) if chosen.endswith((".yaml", ".yml")) else preset(chosen)
    flag_names.require_once(default, argv)
    name, flags = take_flag(flags, ALGORITHM_FLAG)
    if name is not None:
        default = with_algorithm(default, name)
    epochs, flags = take_flag(flags, EPOCHS_FLAG)
    if not {"-h", "--help", "--help-all"}.isdisjoint(flags):
        following = list(itertools.dropwhile(lambda flag: flag not in ("-h", "--help"), flags))[1:]
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), following))
        if words or "--help-all" in flags:
            every = help_text.settings(functools.partial(parse_flags, default, chosen, ["--help"]))
            print(help_text.matches(every, words) if words else help_text.aligned(every))
        else:
            print(help_text.short_help(chosen, default, preset_names()))
        raise SystemExit(0)
    gives_file = any(flag.partition("=")[0] == "--data.path" for flag in flags)
    if gives_file and not isinstance(default.data, FileData):
        readers = [name for name in preset_names() if isinstance(preset(name).data, FileData)]
        raise InputError(
            f"{chosen} makes its own problems and reads no file",
            where="--data.path",
            fix=f"begin with a preset that reads one: {', '.join(readers)}",
        )
    default = with_shorter_phases(default, flags)
    config = parse_flags(default, chosen, flags)
    if not chosen.endswith((".yaml", ".yml")):
        config = with_lengths_of_model(config, flags)
    if epochs is not None:
        if any(flag.partition("=")[0] == "--steps" for flag in flags):
            raise InputError("--epochs and --steps are two lengths of a run", fix="give one")
        config = dataclasses.replace(config, steps=steps_of_epochs(config, epochs))
    run_dir = config.run_dir or str(Path("runs") / Path(chosen).stem)
    config = dataclasses.replace(config, run_dir=run_dir)
    require_trainable(config)
    return config


def with_lengths_of_model(config: ExperimentConfig, flags: list[str]) -> ExperimentConfig:
    """Return the configuration with a preset's lengths in proportion to a model's shorter context.

    Only where no flag gives one of them, and the model is in a folder: others are refused later.
    """
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    path = config.model.path or ""
    is_shipped = path.startswith(BUILTIN)
    folder = PRETRAINED / path.removeprefix(BUILTIN) if is_shipped else Path(path).expanduser()
    file = folder / "config.json"
    if not path or not isinstance(config.data, FileData) or not file.is_file():
        return config
    context = untrusted_files.read_json(file).get("max_position_embeddings")
    sampling = config.sampling
    length = sampling.max_prompt_tokens + sampling.max_new_tokens
    is_set = not names.isdisjoint(("--sampling.max-prompt-tokens", "--sampling.max-new-tokens"))
    if is_set or not isinstance(context, int) or not 1 < context < length:
        return config
    prompt = max(1, context * sampling.max_prompt_tokens // length)
    print(
        f"note: the model's context is {context} tokens: --sampling.max-prompt-tokens {prompt} "
        f"--sampling.max-new-tokens {context - prompt}",
        file=sys.stderr,
    )
    sampling = dataclasses.replace(
        sampling, max_prompt_tokens=prompt, max_new_tokens=context - prompt
    )
    return dataclasses.replace(config, sampling=sampling)


def with_shorter_phases(default: ExperimentConfig, flags: list[str]) -> ExperimentConfig:
    """Return the preset with phases that keep their shares of the run, if --steps is so small that
    its last phase would not end before the run does. Flags of phases leave them as they are."""
    if not default.phases:
        return default
    text, others = take_flag(flags, "--steps")
    steps = int(text) if text is not None and text.isdecimal() else 0
    ends = [phase.until for phase in default.phases]
    if not len(ends) < steps <= max(ends, default=0) or any("--phases." in flag for flag in others):
        return default
    phases = []
    for index, phase in enumerate(default.phases):
        # At least one step for each phase, and one for each stage that follows.
        least = phases[-1].until + 1 if phases else 1
        most = steps - (len(ends) - index)
        until = min(max(least, round(phase.until * steps / default.steps)), most)
        phases.append(dataclasses.replace(phase, until=until))
    shares = ", ".join(str(phase.until) for phase in phases)
    print(f"note: of {steps} steps, phases end with step {shares}", file=sys.stderr)
    return dataclasses.replace(default, phases=tuple(phases), steps=steps)


@reported
def main(argv: list[str]) -> int:
    """Print the help that the arguments ask for, or the error in them, and return the exit code."""
    parse(argv)
    return 0


def steps_of_epochs(config: ExperimentConfig, text: str) -> int:
    """Return the steps in which a run reads the training rows of its files `text` times.

    Rows that are dropped later, since their prompts are too long, count too. Raises InputError if
    the text is no positive number, or the run reads no file.
    """
    try:
        epochs = float(text)
    except ValueError:
        epochs = math.nan
    if not 0 < epochs < math.inf:
        raise InputError(f"{text} epochs", where=EPOCHS_FLAG, fix="give a number above 0")
    if not isinstance(config.data, FileData) or config.data.path is None or config.phases:
        raise InputError(
            "epochs of this run cannot be counted",
            where=EPOCHS_FLAG,
            why="it has phases" if config.phases else "it reads no rows of --data.path",
            fix="give --steps",
        )
    # It reads files, which nothing else here does.
    from tpu_rl.experience.rows import tasks

    rows = tasks.file_rows(config.data, config.algorithm.experience, config.evaluation.rows)[0]
    steps = max(1, round(epochs * len(rows) / config.batch.prompts))
    print(f"{text} epochs of {len(rows):,} rows, {config.batch.prompts} a step: {steps:,} steps")
    return steps


def take_flag(flags: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the last value of a flag, or None without one, and the other flags.

    Raises InputError if the flag has no value.
    """
    value = None
    others = []
    remaining = iter(flags)
    for argument in remaining:
        name, equals, text = argument.partition("=")
        if name != flag:
            others.append(argument)
            continue
        value = text if equals else next(remaining, "")
        if not value or value.startswith("-"):
            raise InputError(f"{flag} has no value", fix=f"as in {flag} {EXAMPLES[flag]}")
    return value, others


def with_algorithm(default: ExperimentConfig, name: str) -> ExperimentConfig:
    """Return the preset with another algorithm.

    Settings of the same name that the preset itself changes stay. Raises InputError if there is no
    such algorithm.
    """
    kind = plugins.find(name)
    names = {setting.name for setting in dataclasses.fields(kind)}
    old = default.algorithm
    changed = {
        name: value
        for name, value in fields_of(old).items()
        if name in names and ranges.is_set(old, name)
    }
    return dataclasses.replace(default, algorithm=kind(**changed))


def plugin_files(config: ExperimentConfig) -> list[Path]:
    """Return the files of the user that algorithms of the run come from."""
    names = [type(stage.algorithm).__name__ for stage in config.stages]
    return [Path(name.rpartition(":")[0]) for name in names if ":" in name]


def parse_flags(default: ExperimentConfig, chosen: str, flags: list[str]) -> ExperimentConfig:
    """Return a configuration with the changes that flags make.

    Raises InputError if a flag is unknown, or its value has another type.
    """
    for index, flag in enumerate(flags):
        # One of Hydra's behind a flag of several values, such as --reward, would be one of them.
        is_setting = not index or re.match(r"--|[+~]{0,2}[a-z_]+(\.[a-z_]+)+=", flag)
        remedy = flag_names.remedy(flag) if is_setting else None
        if remedy is not None:
            name = flag.partition("=")[0]
            raise InputError(f"Unrecognized options: {name}", fix=remedy)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            # The configuration of an algorithm in a file of the user is not in the union.
            warnings.filterwarnings("ignore", "(?s).*does not match any type in Union")
            return tyro.cli(
                ExperimentConfig,
                default=default,
                args=flags,
                prog=f"{typed_command('run')} {chosen}",
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise _flag_error(printed.getvalue()) from None


def _flag_error(printed: str) -> InputError:
    """Return the error that tyro has printed below a title, in a box.

    Where the locale is ASCII, rules are hyphens, and there is no box.
    """
    lines = [line.strip("│| ") for line in printed.splitlines()[1:]]
    groups = itertools.groupby(lines, lambda line: bool(line) and set(line) <= set("─-+╭╮╰╯"))
    blocks = [list(block) for is_rule, block in groups if not is_rule]
    message = " ".join(blocks[0]) if blocks else printed
    words = [word.rstrip(",") for word in message.split()]
    mistyped = next((word for word in words if word.startswith("--")), message)
    nearest = [
        _nearer_form(mistyped, line)
        for block in blocks[1:]
        for line in block
        if line.startswith("--")
    ]
    if "Unrecognized" not in message:
        fix = "--help-all lists all flags"
        if re.search(r"valid parse for arguments: \['[^']*,[^']*'\]$", message):
            fix = "separate several values with spaces, not with commas: 0.7 0.3"
        return InputError(message, where=" ".join(nearest), fix=fix)
    fix = f"did you mean {' or '.join(nearest)}?" if nearest else "--help-all lists all flags"
    fix = flag_names.remedy_in_group(mistyped) or fix
    setting = mistyped.rpartition(".")[2].removeprefix("no-").replace("-", "_")
    for removed in REMOVED.values():
        if setting in removed:
            fix = f"leave it out: it is no longer a setting, and always {removed[setting]}"
    if re.search(r"options: (true|false)$", message, re.IGNORECASE):
        fix = "a switch has no value: --batch.share-prefixes or --batch.no-share-prefixes"
    return InputError(message, fix=fix)


def _nearer_form(mistyped: str, line: str) -> str:
    """Return the flag of tyro's line, which lists a switch as "--name, --no-name"."""
    forms = [word.rstrip(",") for word in line.split() if word.startswith("--")]
    return difflib.get_close_matches(mistyped, forms, n=1, cutoff=0.0)[0]


def require_trainable(config: ExperimentConfig) -> None:
    """Check what only matters for training: a configuration saved earlier can always be read.

    Raises InputError if settings do not go together.
    """
    config_checks.check_training(config)


def preset_names() -> list[str]:
    return sorted(wings.MODULES["presets"].presets())


def preset(name: str) -> ExperimentConfig:
    """Return the preset of that name.

    Raises InputError if there is none; it names the nearest one.
    """
    presets = wings.MODULES["presets"].presets()
    if name not in presets:
        if "=" in name:
            setting, library = name.partition("=")[0], flag_names.library_of(name)
            raise InputError(
                f"{setting} is a setting of {library}, and no preset",
                fix=f"begin with one, such as grpo, sft or dpo, and {flag_names.OTHER_FILES}",
            )
        raise unknown_name("preset", name, preset_names())
    changes = {key: value for key, value in presets[name].items() if key != "about"}
    beginning = to_dict(ExperimentConfig(ALGORITHMS["grpo"].config(), FileData()))
    return from_dict(ExperimentConfig, merged(beginning, changes), find_class)


# --- config.yaml ---


def save(config: ExperimentConfig, path: Path) -> None:
    """Write the file completely or not at all, so that a run that dies can read it again."""
    text = yaml.safe_dump(to_dict(config), sort_keys=False)
    run_files.write_text(path, run_files.sealed(text))


def load(path: Path) -> ExperimentConfig:
    """Return the configuration that an earlier run saved.

    Raises:
        InputError: if it describes a plugin that cannot be loaded.
        DamagedDataError: if the file is not as the run wrote it.
    """
    values, _ = run_files.read_config(path)
    try:
        return from_dict(ExperimentConfig, with_new_names(values), find_class)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise run_files.damage(path, f"it is no configuration: {error}") from error


def load_file(path: Path) -> ExperimentConfig:
    """Return the configuration in a file of the user, who may have edited what a run saved.

    Raises InputError if there is no such file, or it holds no configuration.
    """
    if not path.is_file():
        fix = "give a preset's name or the config.yaml of a run"
        raise missing_file(f"no such file: {path}", path, otherwise=fix)
    try:
        values, _ = run_files.read_config(path, may_be_edited=True)
        if library := flag_names.library_of(*map(str, values)):
            raise InputError(
                f"the file is one of {library}", where=str(path), fix=flag_names.OTHER_FILES
            )
        return from_dict(ExperimentConfig, with_new_names(values), find_class)
    except DamagedDataError as error:
        cause = error.why
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = str(error)
    raise InputError(
        "the file holds no configuration",
        where=str(path),
        why=cause,
        fix="give a preset's name or the config.yaml of a run",
    )


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config.yaml with settings renamed since it was written."""

    def rename(part: dict[str, Any], old: str, new: str) -> dict[str, Any]:
        return {new if name == old else name: value for name, value in part.items()}

    values = dict(values)
    if "checkpoint_every" in values:
        interval = values.pop("checkpoint_every")
        values["checkpoint"] = {"kind": "CheckpointConfig", "interval": interval}
    if isinstance(values.get("samples"), dict):
        samples = rename(values["samples"], "every", "interval")
        values["samples"] = rename(samples, "most", "max_per_step")
    if isinstance(values.get("phases"), list):
        values["phases"] = [
            rename(phase, "forget", "reset_roles") if isinstance(phase, dict) else phase
            for phase in values["phases"]
        ]
    return without_removed(values)


def find_class(kind: str) -> type | None:
    """Find the class of an algorithm's or a task's settings by its name; None of another kind.

    Raises InputError if it is of a file of the user that cannot be loaded.
    """
    if ":" in kind:
        return plugins.from_file(kind)
    task = wings.TASKS.get(lazy.name_of(kind, "Data"))
    row = ALGORITHMS.get(lazy.name_of(kind, "Config"))
    settings = {task.settings} if task else {row.config} if row else {FileData}
    return next((found for found in settings if found.__name__ == kind), None)


MAY_CHANGE = (
    "run_dir",
    "dry_run",
    "steps",
    "checkpoint",
    "evaluation.interval",
    "samples",
    "wandb",
    "trackio",
    "mlflow",
    "reward_limits",
    "environment_limits",
    "agent_seconds",
    "accept_dataset_change",
    "watchdog",
    "debug_nans",
    "mesh",
    "sampling.tensor_parallel",
    "profile",
    "model.remat",
    "model.gradient_barrier",
    "model.attention",
)
"""Settings with which a run may continue although they changed. They change paths, devices,
kernels, logging and time limits, but not the result. `steps` is one of them only if the learning
rate is constant."""


ADDED = {
    "batch": {"whole_logits": "auto"},
    "evaluation": {"sets": []},
    "sampling": {"during_updates": False},
    "algorithm": {"thought_weight": 1.0, "thought_end": [], "reference_reset_share": 1.0},
}
"""Settings that are younger than runs which may go on -> the value with which nothing changes. With
that value they are no part of a run's identity."""


REMOVED: dict[str, dict[str, Any]] = {
    "AStarPoConfig": {"value_beta": 0.5, "reference_samples": 8},
    "DirectAdvantageConfig": {"reference_every": 0},
    "DistillConfig": {"further_teachers": [], "teacher_column": "teacher_name"},
    "DpoConfig": {"simpo_margin": 0.5, "alpha_po": 0.25, "f_alpha": 0.5},
    "EntropySettings": {
        "entropy_target": None,
        "entropy_coef_delta": 0.005,
        "entropy_coef_max": 1.0,
        "sampled_entropy_rate": 0.1,
    },
    "GroupPolicyConfig": {"normalize_advantages": False},
    "MiniLlmConfig": {"length_normalized": True, "single_step": True},
    "MixedConfig": {
        "phi": True,
        "mu_valley": 0.0,
        "mu_decay_steps": 0,
        "replay_size": 1000,
        "solution_reward": 1.0,
        "shaping": 0.1,
        "mixing_gamma": 1.0,
        "mixing_rate": 5e-4,
        "mixing_entropy": None,
        "refinements": 1,
    },
    "PrimeConfig": {
        "process_beta": 0.05,
        "process_coef": 1.0,
        "process_gamma": 1.0,
        "process_learning_rate_scale": 2.0,
    },
    "ProcessRewardConfig": {"hard_labels": False},
    "ReferenceKl": {"kl_reward_estimator": "k1"},
    "ReturnSettings": {"reward_clip_range": None},
    "RewardModelConfig": {"bootstrap": False, "trunks": 1},
    "RolloutConfig": {"constraint_max": 100.0},
    "ScoredCompletionsConfig": {"nll_coef": 1.0},
    "SearchData": {"searches_none": 0.5, "searches_once": 0.1},
    "SelfDistillConfig": {"discount": 0.0, "reference_every": 1},
    "SftConfig": {"ift_mix": 0.2, "ift_gamma": 0.95, "author_gamma": 0.999, "author_cap": 2.0},
    "StopConfig": {"min_gain": 0.0},
    "SurrogatesConfig": {
        "log_ratio_bound": None,
        "k_positive": None,
        "k_negative": None,
        "lambda_positive": None,
        "lambda_negative": None,
        "difficulty_slope": 0.0,
        "negative_scale": 1.0,
        "mastered_probability": 0.99,
    },
    "Thinking": {"answer_top_p": None},
    "UnlearnConfig": {"forget_coef": 1.0},
}
"""Class of settings -> settings that it and its subclasses had, with their defaults, which methods
now have for good. With these a run of before goes on, and has the identity that it had."""

LEFT = {"kl_estimator": ("k1+", "k3+", "abs+")}
"""Setting -> values that it may have no more."""


def removed_settings(kind: type | None, name: str) -> dict[str, Any]:
    """Return the settings that a class had, with their defaults."""
    names = [name, *(base.__name__ for base in (kind.__mro__ if kind else ()))]
    return {setting: value for base in names for setting, value in REMOVED.get(base, {}).items()}


def without_removed(values: Any) -> Any:
    """Return the plain values of a config.yaml without settings that left at their defaults.

    Raises InputError if one has another value.
    """
    if isinstance(values, list):
        return [without_removed(value) for value in values]
    if not isinstance(values, dict):
        return values
    kind = str(values.get("kind"))
    removed = removed_settings(find_class(kind), kind)
    for name, value in values.items():
        if (name in removed and value != removed[name]) or value in LEFT.get(name, ()):
            instead = f"it is always {removed[name]}" if name in removed else "nothing else has it"
            raise InputError(
                f"{name} {value} is no longer a setting of {kind}",
                where=f"{name}: {value}",
                why=f"no preset or document used it; {instead} now",
                fix="continue the run with the version that began it, or start another",
            )
    return {name: without_removed(value) for name, value in values.items() if name not in removed}


def with_removed(config: Any, values: Any) -> Any:
    """Return the plain values of a dataclass with those of the settings that left."""
    if isinstance(config, tuple):
        return [with_removed(*pair) for pair in zip(config, values, strict=True)]
    if not dataclasses.is_dataclass(config):
        return values
    fields = {name: with_removed(own, values[name]) for name, own in fields_of(config).items()}
    kind = type(config)
    return {"kind": kind.__name__} | removed_settings(kind, kind.__name__) | fields


def fixed_settings(config: ExperimentConfig) -> dict[str, Any]:
    """Return name -> value of every setting that is not in MAY_CHANGE."""
    values = with_removed(config, to_dict(config))
    if config.stop == StopConfig():
        del values["stop"]  # As in `ADDED`, all of it.
    for part in (values, *values["phases"]):
        for group, settings in ADDED.items():
            for name, value in settings.items():
                if part.get(group, {}).get(name) == value:
                    del part[group][name]
    return {
        name: value
        for name, value in flatten(values).items()
        if name not in MAY_CHANGE and name.partition(".")[0] not in MAY_CHANGE
    }


def _fixed_here(config: ExperimentConfig, new: ExperimentConfig | None = None) -> dict[str, Any]:
    """Return the values of settings in MAY_CHANGE that change the result of this run, or of `new`.

    A schedule that decays until the last step changes when that step moves, and a choice of the
    best evaluation when others are made.
    """
    new = new or config
    settings: dict[str, Any] = {}
    if new.optimizer.schedule != "constant":
        settings["steps"] = config.steps
    if new.stop.metric:
        settings["evaluation.interval"] = config.evaluation.interval
    return settings


def settings_hash(config: ExperimentConfig) -> str:
    """Return a hash of the settings that must stay while a run goes on."""
    settings = fixed_settings(config) | _fixed_here(config)
    return run_files.checksum(settings)


def differences(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Return lines "name: old -> new" for all values that differ, except those in MAY_CHANGE."""
    before = fixed_settings(old) | _fixed_here(old, new)
    after = fixed_settings(new) | _fixed_here(new)
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
