"""What an experiment is: one frozen value, made by a preset, changed by flags, saved as config.yaml.

Each part is a small dataclass beside its consumer or, if only `launch` reads it, here. No accelerator is touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro
import yaml

from launch import membership, presets, profiling, requirements
from launch.plain_values import from_dict, to_dict
from launch.watchdog import WatchdogConfig
from tpu_rl.algos import AlgorithmConfig
from tpu_rl.environments import Arithmetic, StarGraph
from tpu_rl.errors import InputError
from tpu_rl.models import LoraConfig
from tpu_rl.optimizers import OptimizerConfig
from tpu_rl.reward_workers import RewardLimits
from tpu_rl.sampler import Speculation

DEFAULT_PRESET = "arithmetic_grpo"


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = None
    """Hugging Face directory with safetensors, a hub id (local cache first), or builtin:NAME for a shipped model."""
    random_init: bool = False
    """Take only config.json and the tokenizer from `path`; weights are random. For training from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; adapters and the optimizer's moments are always float32. In bfloat16 an update of less than a
    256th of a weight is lost: for weights that do not learn, as beneath adapters."""
    attention: Literal["auto", "tiles", "cudnn"] = "auto"
    """auto: on TPUs, of rows whose length 128 divides, a Pallas kernel that never holds a layer's scores; on NVIDIA
    GPUs in bfloat16, for learning and log-probs, cuDNN's kernel for the tiles that see each other, if a trial on them
    gives what the reference does. tiles: XLA's products of these tiles, as everywhere else. cudnn: as auto on GPUs, and
    an error where it cannot be."""
    remat: Literal["full", "products", "none"] = "full"
    """What the backward pass computes again of a layer, so that it need not be kept: full: all of it; products: what
    lies between its products with weights, whose results are kept, and attention's (experts are computed again); none:
    nothing, but experts that several devices share."""
    lora: LoraConfig = LoraConfig()
    router_balance: float = 0.0
    """Of a mixture of experts: how much of its load-balance loss is added to what is learned. Published ones come
    balanced, and their configurations add none where they are fine-tuned (output_router_logits is false); 0.001 to 0.01
    is what they were pretrained with."""


@dataclass(frozen=True)
class ArithmeticData:
    """Integer expressions made as needed; training and evaluation never share one (see `environments`)."""

    train: Arithmetic = Arithmetic()
    evaluation: Arithmetic = Arithmetic()
    written_share: tuple[float, ...] = (0.33,)
    """Demonstrations only: how many answers write the calculation out, the rest being bare answers; one share, or one
    for each number of terms."""


@dataclass(frozen=True)
class StarGraphData:
    """Paths in star graphs (see `environments`); pretraining, post-training and evaluation have graphs of their own."""

    graph: StarGraph = StarGraph()
    rows: int = 200_000
    """Training graphs."""
    split: Literal["train", "post"] = "post"
    """Which graphs are trained on: those of pretraining, or others."""


@dataclass(frozen=True)
class FileData:
    """JSONL or Parquet rows."""

    path: str | None = None
    """Training rows: `prompt` (text or messages), `messages`, or `prompt` and `completion`, and any other columns; for
    preferences `prompt, chosen, rejected`, or, judged one by one, `prompt, completion, label`."""
    evaluation_path: str | None = None
    """Held-out rows; without it the last rows of `path` are held out and never trained on."""
    format: Literal["plain", "code", "gsm8k", "gsm8k_solutions"] = "plain"
    """code: also a column `tests`, which the reward python_tests judges by. gsm8k: columns `question` and `answer`, as
    published. gsm8k_solutions: example_model_solutions.jsonl, of which right and wrong solutions of a problem make
    pairs; the last problems are held out, a quarter at most."""
    instruction: str = ""
    """Appended to every prompt (to the last user message, if prompts are messages)."""


@dataclass(frozen=True)
class BatchConfig:
    prompts: int = 32
    """Prompts (or demonstrations) a step of the run."""
    completions: int = 8
    """Completions of each prompt: the group. 1 for demonstrations."""
    minibatches: int = 1
    """Optimizer steps that a batch is cut into."""
    epochs: int = 1
    """Passes over the batch."""
    row_length: int = 512
    """Tokens of a packed row."""
    micro_batch_rows: int = 8
    """Packed rows in memory at once, over all devices; more where these could not share them evenly."""
    refill_rounds: int = 0
    """Dynamic sampling: at most so many further batches are sampled to replace groups whose rewards are all equal."""
    carry_over: int = 0
    """Partial rollouts: so many groups may be unfinished when the batch is complete, which is looked at every
    --sampling.segment tokens; they go on in the next step (see launch/carry_over.py). 0: all that a step learns from
    its own policy has drawn."""
    ahead: bool = False
    """Sample the next step's completions before this step's update, while its rewards are computed in other processes:
    what a step learns from is then one update old."""


@dataclass(frozen=True)
class SamplingConfig:
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_rows: int = 256
    """Completions decoded at once; one that ends leaves its place to the next."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that are in the text already, where positive, and multiplies negative ones. Like
    logit_bias and stop_strings, for training's completions; of these, evaluation heeds stop_strings only."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits; -inf forbids a token."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in its text."""
    cache: Literal["computed", "int8"] = "computed"
    """What keys and values are kept in: the type that they are computed in, or int8 with a scale a token and head, half
    of bfloat16's memory. The log-probs of what is drawn are then those of rounded keys and values, not the trainer's:
    policy/log_prob_gap_mean says by how much, GRPO's --algorithm.importance-cap with recomputed old log-probs corrects
    for it. Evaluation rounds nothing."""
    tensor: int | None = None
    """Devices that cut heads, widths and vocabulary between them while completions are drawn, rows being spread over
    the others, whatever the run's mesh is, and the experts of a mixture over all, if these divide them; null: the run's
    mesh. Decoding then gathers no weights."""
    segment: int = 128
    """Decode steps between two looks of the host, which asks for rewards of ended groups and finds stop strings."""
    speculation: Speculation = Speculation()
    """The same completions in fewer steps, for training's; evaluation and Q#'s decode plainly."""


@dataclass(frozen=True)
class EvaluationConfig:
    rows: int = 500
    """Held-out problems; 0 evaluates never."""
    every: int = 10
    """Steps between evaluations, besides the ones before and after."""
    reward: str | None = None
    """What says that an answer is right (above 0.5); the first --reward if it is not given."""
    greedy: bool = True
    """Also evaluate the most likely completion, before and after."""


@dataclass(frozen=True)
class MeshConfig:
    data: int = 1
    fsdp: int = -1
    """-1: all devices that the other axes leave."""
    tensor: int = 1
    expert: int = 1
    """Over which the experts of a mixture are spread; to all else it is more of fsdp."""
    context: int = 1
    """Over which the tokens of each packed row are spread, where a row is too long for one device."""


@dataclass(frozen=True)
class Plateau:
    """A metric that no longer rises."""

    metric: str
    over: int = 8
    """Steps whose mean is compared with the mean of as many before them."""
    gain: float = 0.02
    """What the mean must have risen by for the phase to go on."""


@dataclass(frozen=True)
class Phase:
    """Something a run does before its `algorithm`: value pretraining, a round of Q#."""

    algorithm: AlgorithmConfig
    until: int
    """The last step of the run that it takes."""
    forget: tuple[str, ...] = ()
    """Roles that return to their first params when it ends, once the next phase has made its source from them."""
    ends_when_flat: Plateau | None = None
    """It ends before `until` once this is flat; what follows begins earlier, and the run is as long as ever."""


class Stage(NamedTuple):
    """A phase with its place in the run."""

    index: int
    algorithm: AlgorithmConfig
    first: int
    """The first step of the run that it takes."""
    last: int
    forget: tuple[str, ...]
    """Roles that begin it with their first params."""
    ends_when_flat: Plateau | None


@dataclass(frozen=True)
class ExperimentConfig:
    algorithm: AlgorithmConfig
    data: ArithmeticData | StarGraphData | FileData
    model: ModelConfig = ModelConfig()
    reward: tuple[str, ...] = ()
    """Names of built-in rewards, or FILE.py:function. Several are added up."""
    reward_limits: RewardLimits = RewardLimits()
    allow_unsandboxed_code: bool = False
    """Run model-written programs (reward python_tests) unconfined, where the kernel cannot confine them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    mesh: MeshConfig = field(default_factory=MeshConfig)
    phases: tuple[Phase, ...] = ()
    """What the run does first; `algorithm` takes the steps after them."""
    steps: int = 100
    seed: int = 0
    run_dir: str = ""
    """Where everything goes; runs/PRESET if empty. The same command on the same folder goes on where it stopped."""
    checkpoint_every: int = 20
    wandb: bool = False
    watchdog: WatchdogConfig = WatchdogConfig()
    debug_nans: bool = False
    """End at the first step that is not finite, with the line of the operation that made it so."""
    profile: str = ""
    """FROM:TO, steps whose trace is written to RUN_DIR/profile."""
    dry_run: bool = False
    """Print what would run, and stop."""
    accept_dataset_change: bool = False
    """Go on with data other than those that the run began with; the run folder keeps a record of it."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The phases, then `algorithm`, with the steps that each takes where none ends early."""
        return self.stages_ended(())

    def stages_ended(self, early: Sequence[int]) -> tuple[Stage, ...]:
        """The same where phases ended early at these steps: the next begins earlier, `algorithm` takes what is left."""
        stages, first, forget = [], 1, ()
        for index, phase in enumerate((*self.phases, Phase(self.algorithm, self.steps))):
            last = next((step for step in early if first <= step < phase.until), phase.until)
            stages.append(Stage(index, phase.algorithm, first, last, forget, phase.ends_when_flat))
            first, forget = last + 1, phase.forget
        return tuple(stages)

    def __post_init__(self):
        for name, value in (
            ("--steps", self.steps),
            ("--checkpoint-every", self.checkpoint_every),
            ("--evaluation.every", self.evaluation.every),
            ("--batch.prompts", self.batch.prompts),
            ("--batch.minibatches", self.batch.minibatches),
            ("--batch.epochs", self.batch.epochs),
            ("--batch.micro-batch-rows", self.batch.micro_batch_rows),
            ("--sampling.max-new-tokens", self.sampling.max_new_tokens),
            ("--sampling.segment", self.sampling.segment),
        ):
            if value < 1:
                raise InputError(f"{name} is {value}", where=name, fix="use at least 1")
        requirements.run_dir(self.run_dir)
        profiling.require(self.profile, self.steps)
        ends = [0, *(phase.until for phase in self.phases), self.steps]
        if self.steps > 0 and sorted(set(ends)) != ends:
            raise InputError(
                f"phases end with steps {', '.join(map(str, ends[1:]))}",
                where="--phases, --steps",
                fix="let each end after the one before it",
            )
        requirements.sampling(self)
        requirements.batch(self)


# --- command line ------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> ExperimentConfig:
    """[PRESET] [--flags] -> the resolved configuration. PRESET may be the config.yaml of an earlier run."""
    chosen = argv[0] if argv and not argv[0].startswith("-") else DEFAULT_PRESET
    flags = argv[1:] if argv and not argv[0].startswith("-") else argv
    default = load(Path(chosen)) if chosen.endswith((".yaml", ".yml")) else preset(chosen)
    if not isinstance(default.data, FileData) and any(flag.partition("=")[0] == "--data.path" for flag in flags):
        readers = ", ".join(name for name in preset_names() if isinstance(preset(name).data, FileData))
        fix = f"begin with a preset that reads one: {readers}"
        raise InputError(f"{chosen} makes its own problems and reads no file", where="--data.path", fix=fix)
    config = tyro.cli(
        ExperimentConfig,
        default=default,
        args=flags,
        prog=f"launch/run.py {chosen}",
        description=f"Preset {chosen}. All presets: {', '.join(preset_names())}. {membership.HELP}.",
        config=(tyro.conf.AvoidSubcommands,),
    )
    run_dir = config.run_dir or str(Path("runs") / Path(chosen).stem)
    config = dataclasses.replace(config, run_dir=run_dir)
    requirements.learning(config)
    return config


def preset_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(presets.__path__))


def preset(name: str) -> ExperimentConfig:
    """The preset of that name; InputError with the nearest one if there is none."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise InputError(f"unknown preset {name!r}", fix=f"did you mean {near[0]}? All: {', '.join(names)}")
    return importlib.import_module(f"launch.presets.{name}").CONFIG


# --- config.yaml -------------------------------------------------------------------------------------------------


def save(config: ExperimentConfig, path: Path) -> None:
    """Wholly or not at all: a run that dies meanwhile must find its configuration again."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")
    unfinished.replace(path)


def load(path: Path) -> ExperimentConfig:
    """A configuration saved by an earlier run."""
    if not path.is_file():
        raise InputError(f"no such file: {path}", fix="give a preset's name or the config.yaml of a run")
    return from_dict(ExperimentConfig, yaml.safe_load(path.read_text(encoding="utf-8")))


MAY_CHANGE = ("run_dir", "dry_run", "steps", "checkpoint_every", "evaluation.every", "wandb", "reward_limits")
MAY_CHANGE += ("accept_dataset_change", "watchdog", "debug_nans", "mesh", "sampling.tensor", "profile")
MAY_CHANGE += ("model.remat", "model.attention")
"""What a run may be continued with: where it lies, on what devices, by which of several programs for the same numbers,
what it writes when, what its rewards may take, how long it may stand still, and, at a constant rate, how long it is."""


def that_stay(config: ExperimentConfig) -> dict[str, Any]:
    """Name -> value of every setting that is not in MAY_CHANGE."""

    def flat(values: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(values, dict):
            return {prefix: values}
        return {k: v for name, value in values.items() for k, v in flat(value, f"{prefix}.{name}".strip(".")).items()}

    every = flat(to_dict(config), "")
    return {k: v for k, v in every.items() if k not in MAY_CHANGE and k.partition(".")[0] not in MAY_CHANGE}


def differences(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Lines "name: old -> new" for every value that differs, other than those in MAY_CHANGE."""
    before, after = that_stay(old), that_stay(new)
    # A schedule that falls until the last step is another one when that step moves.
    if new.optimizer.schedule != "constant":
        before["steps"], after["steps"] = old.steps, new.steps
    names = before | after
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]
