"""Q# where steering pays: budget_lists.py, reward against KL of Q#, CD, FUDGE, best of n and GRPO.

    python research/2026_11/steering.py --to runs/steering [--seeds 0 1 2] [--grpo-seeds 0]
        [--chart docs/curves/steering.svg]

Pretrains a small reference on lists that know nothing of the budget, and trains one q per seed on
the reference's own lists. GRPO trains the reference itself, once per coefficient of the KL, on as
many lists. All methods answer the same 1,000 held-out prompts. Prints

- mean reward and KL of all methods,
- how far q is from exact values,
- the gain of Q# over each method at the same KL, with a bootstrap over prompts,
- what the methods would reach with exact values in place of q.

Finished parts are not repeated.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import arms
import budget_lists
import jax
import jax.numpy as jnp
import numpy as np
import q_sharp
from budget_lists import Exact
from fronts import Answers, front, mean_of_seeds, percent, show_all_gains, show_gains

from tpu_rl import models
from tpu_rl.algos import GrpoConfig, QSharpConfig, SftConfig
from tpu_rl.commands import compose, config, evaluate_q_sharp, evaluators, saved_run
from tpu_rl.commands.config import (
    CheckpointConfig,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    MeshConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.evaluation import guided_accuracy
from tpu_rl.evaluation.answer_accuracy import Evaluation
from tpu_rl.experience import tasks
from tpu_rl.experience.config import sampler_config
from tpu_rl.losses import return_distributions
from tpu_rl.report import plots
from tpu_rl.rewards import AnswerReaders
from tpu_rl.sampler import guided_policy
from tpu_rl.train.optimizers import OptimizerConfig
from tpu_rl.types import Array

TASK = Path(__file__).with_name("budget_lists.py")
NUMBERS_MODEL = arms.ROOT / "tpu_rl" / "pretrained" / "star_graph"
LAYERS = 3
"""Of the reference, and of q."""
HELD_OUT = 1000
DEMONSTRATIONS = 76_800
PROMPTS = 38_400
"""Prompts that q, and GRPO, learn from, each with GROUP completions. Nothing is learned twice."""
GROUP = 8
BATCH_PROMPTS = 64
Q_BATCH_PROMPTS = 16
Q_SHARP_COEFFICIENTS = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1)
CD_COEFFICIENTS = (1.0, 0.5, 0.3, 0.2, 0.1)
SETTINGS: tuple[tuple[return_distributions.Method, float], ...] = (
    *(("q_sharp", kl_coef) for kl_coef in Q_SHARP_COEFFICIENTS),
    *(("cd", kl_coef) for kl_coef in CD_COEFFICIENTS),
    ("fudge", math.inf),
)
GRPO_COEFFICIENTS = (0.3, 0.1)
EXACT_SETTINGS = (
    ("Q#", "q_sharp", (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05)),
    ("CD", "mean_guided", (1.0, 0.5, 0.3, 0.2, 0.1)),
    ("best of n by reward", "best_of", (2, 4, 8, 16)),
)
"""Method, function of `Exact`, and its arguments."""
BEST_OF = (2, 4, 8)
SAMPLES = 2
"""Completions per held-out prompt. The reference, whose best is chosen, has max(BEST_OF)."""
MAX_NUM_SEQS = 512
REFERENCE_PARAMS = models.Select("reference")


# --- training ---


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write the training and the held-out rows, which share no prompt, and return their files."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        prompts = budget_lists.all_prompts()
        held_out, train = prompts[:HELD_OUT], prompts[HELD_OUT:]
        shown = [train[index % len(train)] for index in range(DEMONSTRATIONS)]
        generator = np.random.default_rng(0)
        for file, asked in zip(files, (shown, held_out), strict=True):
            rows = [
                {"prompt": prompt, "completion": budget_lists.demonstration(prompt, generator)}
                for prompt in asked
            ]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def write_model(folder: Path) -> Path:
    """Write the shape of the reference, with a tokenizer that has a token for each number."""
    model = folder / "shape"
    if not model.exists():
        shutil.copytree(NUMBERS_MODEL, model)
        shape = json.loads((NUMBERS_MODEL / "config.json").read_text(encoding="utf-8"))
        shape["num_hidden_layers"] = LAYERS
        (model / "config.json").write_text(json.dumps(shape, indent=2), encoding="utf-8")
    return model


def base_config(folder: Path) -> ExperimentConfig:
    """Return what all runs have in common: pretraining."""
    train, held_out = write_rows(folder)
    return replace(
        config.preset("sft"),
        algorithm=SftConfig(),
        data=FileData(path=str(train), evaluation_path=str(held_out)),
        model=ModelConfig(path=str(write_model(folder)), random_init=True, remat="none"),
        reward=(f"{TASK}:reward",),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="cosine", warmup_steps=100, final_share=0.05, beta2=0.98
        ),
        batch=BatchConfig(prompts=64, group_size=1, row_length=128, micro_batch_rows=8),
        sampling=SamplingConfig(
            max_prompt_tokens=8,
            max_new_tokens=budget_lists.MAX_ITEMS + 1,
            max_num_seqs=MAX_NUM_SEQS,
        ),
        evaluation=EvaluationConfig(rows=200, interval=300),
        steps=DEMONSTRATIONS // BATCH_PROMPTS,
        checkpoint=CheckpointConfig(400),
        run_dir=str(folder / "pretrain"),
    )


def q_config(base: ExperimentConfig, seed: int) -> ExperimentConfig:
    """Return the run of q: one round of whole answers of the reference, learned once."""
    steps = PROMPTS // Q_BATCH_PROMPTS
    return replace(
        base,
        optimizer=replace(base.optimizer, learning_rate=2e-3),
        algorithm=QSharpConfig(
            distribution="histogram",
            support=(0.0, 1.0, 51),
            labels="two_hot",
            roll_in="none",
            # Four prices, the end, and one to spare.
            candidates=6,
            prompts=PROMPTS,
        ),
        model=reference_model(base),
        batch=replace(base.batch, prompts=Q_BATCH_PROMPTS, group_size=GROUP),
        evaluation=replace(base.evaluation, rows=0),
        steps=steps,
        checkpoint=CheckpointConfig(steps // 4),
        seed=seed,
        run_dir=str(Path(base.run_dir).parent / f"q_{seed}"),
    )


def grpo_config(base: ExperimentConfig, seed: int, kl_coef: float) -> ExperimentConfig:
    """Return the run of GRPO for reward - kl_coef KL.

    Advantages are not divided by the spread of a group's rewards, which would change kl_coef.
    """
    steps = PROMPTS // BATCH_PROMPTS
    return replace(
        base,
        algorithm=GrpoConfig(advantages="leave_one_out", kl_reward_coef=kl_coef),
        model=reference_model(base),
        optimizer=replace(base.optimizer, learning_rate=5e-4, warmup_steps=10),
        batch=replace(base.batch, group_size=GROUP, micro_batch_rows=32),
        evaluation=replace(base.evaluation, rows=0),
        steps=steps,
        checkpoint=CheckpointConfig(steps // 4),
        seed=seed,
        run_dir=str(Path(base.run_dir).parent / f"grpo_{kl_coef:g}_{seed}"),
    )


def reference_model(base: ExperimentConfig) -> ModelConfig:
    return replace(base.model, path=f"{base.run_dir}/model", random_init=False)


# --- held-out prompts ---


class HeldOut:
    """The held-out prompts, the reference that answers them, and the numbers of its answers."""

    def __init__(self, base: ExperimentConfig):
        self.config = replace(base, evaluation=replace(base.evaluation, rows=HELD_OUT))
        self.rows = tasks.evaluation_rows(
            base.data, base.algorithm.experience, self.config.evaluation.rows
        )
        self.mesh = compose.make_mesh(MeshConfig())
        with jax.set_mesh(self.mesh):
            self.language, self.params = saved_run.load_language(base.run_dir, base)
        self.scorer = evaluators.answer_scorer(base, self.language.tokenizer, self.rows)
        self.exact = [Exact(budget_lists.parse(row["prompt"])) for row in self.rows]

    def task(self, samples: int) -> guided_accuracy.Task:
        """Return the prompts with `samples` completions each."""
        settings = sampler_config(self.config.sampling, self.language.tokenizer, samples)
        return guided_accuracy.Task(
            self.rows, self.scorer, AnswerReaders(), settings, self.config.seed, self.mesh
        )

    def answers(self, name: str, setting: str, result: Evaluation, kl: np.ndarray) -> Answers:
        """Return the numbers of an evaluation; `kl` [N] is that of its completions."""
        rewards = self.rewards(result)
        kl_by_prompt = np.asarray(kl, np.float64).reshape(rewards.shape).mean(1)
        return Answers(name, setting, rewards.mean(1), (rewards == 1).mean(1), kl_by_prompt)

    def rewards(self, result: Evaluation) -> np.ndarray:
        """Return the rewards [prompts, samples] of an evaluation."""
        return np.array(
            [
                [budget_lists.spent(row["prompt"], text) for text in problem.completions]
                for row, problem in zip(self.rows, result.problems, strict=True)
            ]
        )

    def exactly(
        self, name: str, setting: str, point: Callable[[Exact], budget_lists.Point]
    ) -> Answers:
        """Return the exact numbers of the process that the reference imitates."""
        columns = np.array([point(exact) for exact in self.exact]).T
        return Answers(name, setting, *columns)


def answer_guided(
    held_out: HeldOut,
    guided: guided_accuracy.Guided,
    method: return_distributions.Method,
    kl_coef: float,
) -> Answers:
    """Answer with the reference that q guides. FUDGE has no coefficient: it is infinite."""
    task = held_out.task(SAMPLES)
    policy = guided.guide(method)
    params = guided_policy.with_kl_coef(guided.params, kl_coef)
    result = guided_accuracy.answer(task, policy, params)
    kl = guided_accuracy.completion_kl(
        policy, guided.reference, params, result.rollout, task.sampler
    )
    setting = "" if math.isinf(kl_coef) else f"{kl_coef:g}"
    return held_out.answers(guided_accuracy.NAMES[method], setting, result, kl)


def answer_grpo(held_out: HeldOut, run_config: ExperimentConfig, kl_coef: float) -> Answers:
    """Answer with the policy that GRPO has trained."""
    language, trained = saved_run.load_language(run_config.run_dir, run_config)
    policy = models.policy(language.model, evaluate_q_sharp.POLICY_PARAMS)
    reference = models.policy(held_out.language.model, REFERENCE_PARAMS)
    params = {"policy": trained, "reference": held_out.params}
    task = held_out.task(SAMPLES)
    result = guided_accuracy.answer(task, policy, params)
    kl = guided_accuracy.completion_kl(policy, reference, params, result.rollout, task.sampler)
    return held_out.answers("GRPO", f"{kl_coef:g}", result, kl)


# --- best of n ---


def answer_best_of(
    held_out: HeldOut, guided: guided_accuracy.Guided, result: Evaluation
) -> list[Answers]:
    """Choose among the reference's completions, by their reward and by q.

    The KL of the choice by reward is exact, with ties. That of the choice by q is without ties.
    """
    rewards = held_out.rewards(result)
    begins, ends = guided_accuracy.spans(result.rollout)

    def batch_scores(tokens: Array, begins: Array, ends: Array) -> Array:
        del begins
        return guided_policy.last_return(
            guided.q, guided.support, guided.reads, guided.params, tokens, ends
        )

    scores = guided_accuracy.in_batches(
        batch_scores, result.rollout, begins, ends, MAX_NUM_SEQS
    ).reshape(rewards.shape)
    lines = []
    for name, judgments in (("best of n by reward", rewards), ("best of n by q", scores)):
        for n in BEST_OF:
            if judgments is rewards:
                kl = held_out.exactly("", "", operator.methodcaller("best_of", n)).kl
            else:
                kl = np.full(len(rewards), budget_lists.nominal_kl(n))
            chosen = best_of(judgments, rewards, n)
            exact = best_of(judgments, (rewards == 1).astype(float), n)
            lines.append(Answers(name, str(n), chosen, exact, kl))
    return lines


def best_of(judgments: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Return [P]: the mean, over all n of a prompt's completions, of the best one's value.

    judgments, values [P, samples]. Of the n, the best is that with the highest judgment.
    """
    samples = values.shape[1]
    order = np.argsort(judgments, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    # The completion of rank r is the best of those subsets whose others are below it.
    chances = [math.comb(rank, n - 1) / math.comb(samples, n) for rank in range(samples)]
    return ranked @ np.array(chances)


# --- q against exact values ---


def q_errors(
    held_out: HeldOut, guided: guided_accuracy.Guided, result: Evaluation, kl_coef: float
) -> dict[str, float]:
    """Compare q with the exact values of the prefixes of the reference's completions.

    Of prefixes with at least one item, within the budget and above it, returns the number, and root
    mean squares of the error of q's mean return, and of its soft maximum kl_coef log E exp(return /
    kl_coef), which guides Q#; and the mean chance that q gives to any reward.
    """
    rollout = result.rollout
    begins, ends = guided_accuracy.spans(rollout)

    @jax.jit
    def batch_values(tokens: Array, begins: Array, ends: Array) -> Array:
        del begins
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        cache = guided.q.init_cache(guided.params, *tokens.shape)
        outputs, _ = guided.q.extend(
            guided.params, cache, tokens, positions, jnp.zeros_like(tokens), ends
        )
        mean = return_distributions.mean_return(outputs, guided.support)
        soft = kl_coef * return_distributions.soft_offset(outputs, kl_coef, guided.support)
        any_reward = 1 - jax.nn.softmax(outputs)[..., 0]
        return jnp.stack([any_reward, mean, soft], axis=-1)

    predicted = guided_accuracy.in_batches(batch_values, rollout, begins, ends, MAX_NUM_SEQS)
    errors: dict[str, list[np.ndarray]] = {"within": [], "above": []}
    for exact, problem in zip(held_out.exact, result.problems, strict=True):
        factors = np.exp(exact.returns / kl_coef)
        tables = [
            (final @ exact.returns, kl_coef * np.log(final @ factors)) for final in exact.final
        ]
        for row, text in zip(problem.rows, problem.completions, strict=True):
            state = 0
            bought = budget_lists.numbers(text)[: budget_lists.MAX_ITEMS]
            if not set(bought) <= set(exact.shop.prices):
                continue
            for items, price in enumerate(bought, start=1):
                state = min(state + price, exact.shop.budget + 1)
                values = [0.0, *(table[state] for table in tables[items])]
                place = "within" if state <= exact.shop.budget else "above"
                errors[place].append(predicted[row, begins[row] + items - 1] - values)
    numbers = {}
    for place, rows in errors.items():
        any_reward, mean, soft = np.array(rows).T
        numbers |= {
            f"{place}/prefixes": len(rows),
            f"{place}/any_reward": float(any_reward.mean()),
            f"{place}/mean_error": float(np.sqrt(np.mean(mean**2))),
            f"{place}/soft_error": float(np.sqrt(np.mean(soft**2))),
        }
    return numbers


# --- tables ---


def exact_lines(held_out: HeldOut) -> list[Answers]:
    """Return what exact values would give in place of q."""
    return [
        held_out.exactly("reference", "", Exact.reference),
        *(
            held_out.exactly(name, f"{setting:g}", operator.methodcaller(method, setting))
            for name, method, settings in EXACT_SETTINGS
            for setting in settings
        ),
    ]


def show(lines: Sequence[Answers]) -> None:
    arms.print_heading("method", "setting", "mean reward, %", "whole budget, %", "KL, nats")
    for line in lines:
        arms.print_row(
            line.name,
            line.setting,
            percent(line.rewards),
            percent(line.exact),
            f"{line.kl.mean():.3f}",
        )


def chart(lines: Sequence[Answers]) -> str:
    """Return an SVG of mean reward over KL, one line per method."""
    names = ("Q#", "CD", "best of n by q", "GRPO")
    series = []
    for name in names:
        kl, rewards = (values.mean(1) for values in front(lines, name))
        order = np.argsort(kl)
        series.append(plots.Series(name, kl[order], rewards[order]))
    figure = plots.line_chart(series, size=plots.WIDE, percent=True, x_label="KL, nats")
    return plots.as_svg(figure)


# --- all of it ---


def measure(
    held_out: HeldOut, base: ExperimentConfig, seed: int, has_grpo: bool
) -> tuple[list[Answers], dict[str, float]]:
    """Train q, and GRPO if asked to, and return (the answers of all methods, the errors of q)."""
    folder = Path(base.run_dir).parent / f"answers_{seed}"
    folder.mkdir(exist_ok=True)
    run_config = q_config(base, seed)
    q_sharp.train(run_config)

    @functools.cache
    def guided() -> tuple[guided_accuracy.Guided, float]:
        return evaluate_q_sharp.load(run_config.run_dir, held_out.language, held_out.params)

    def alone() -> list[Answers]:
        model, kl_coef = guided()
        task = held_out.task(max(BEST_OF))
        result = guided_accuracy.answer(task, model.reference, model.params)
        errors = q_errors(held_out, model, result, kl_coef)
        errors_file.write_text(json.dumps(errors), encoding="utf-8")
        no_kl = np.zeros(len(result.rollout.tokens))
        reference = held_out.answers("reference", "", result, no_kl)
        return [reference, *answer_best_of(held_out, model, result)]

    def guided_by(method: return_distributions.Method, kl_coef: float) -> list[Answers]:
        return [answer_guided(held_out, guided()[0], method, kl_coef)]

    def grpo(kl_coef: float) -> list[Answers]:
        trained = grpo_config(base, seed, kl_coef)
        q_sharp.train(trained)
        with jax.set_mesh(held_out.mesh):
            return [answer_grpo(held_out, trained, kl_coef)]

    errors_file = folder / "errors.json"
    with jax.set_mesh(held_out.mesh):
        lines = once(folder / "reference.json", alone)
        for method, kl_coef in SETTINGS:
            file = folder / f"{method}_{kl_coef:g}.json"
            lines += once(file, functools.partial(guided_by, method, kl_coef))
    for kl_coef in GRPO_COEFFICIENTS if has_grpo else ():
        lines += once(folder / f"grpo_{kl_coef:g}.json", functools.partial(grpo, kl_coef))
    return lines, json.loads(errors_file.read_text(encoding="utf-8"))


def once(file: Path, compute: Callable[[], list[Answers]]) -> list[Answers]:
    """Return what the file has, or compute it and write the file."""
    if not file.exists():
        lines = compute()
        stored = [[*line[:2], *(column.tolist() for column in line[2:])] for line in lines]
        file.write_text(json.dumps(stored), encoding="utf-8")
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [Answers(*line[:2], *map(np.array, line[2:])) for line in stored]


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grpo-seeds", type=int, nargs="*", default=[0], help="seeds of GRPO")
    parser.add_argument("--chart", type=Path, help="the SVG file to write, of the first seed")
    flags = parser.parse_args()
    base = base_config(flags.to)
    q_sharp.train(base)
    held_out = HeldOut(base)
    measured = {}
    for seed in flags.seeds:
        lines, errors = measure(held_out, base, seed, seed in flags.grpo_seeds)
        print(f"\nseed {seed}\n")
        show(lines)
        print(f"\nq against exact values: {errors}")
        measured[seed] = lines
    if len(measured) > 1:
        print(f"\nmean of {len(measured)} seeds\n")
        show(mean_of_seeds(list(measured.values())))
    show_all_gains(measured)
    if flags.chart:
        flags.chart.write_text(chart(measured[flags.seeds[0]]), encoding="utf-8")
    print("\nwith exact values in place of q\n")
    exact = once(flags.to / "exact.json", lambda: exact_lines(held_out))
    show(exact)
    print()
    show_gains(exact, exact)
    for seed, lines in measured.items():
        print(f"\nseed {seed} against exact values\n")
        show_gains(lines, exact)
    if len(measured) > 1:
        print(f"\nmean of {len(measured)} seeds against exact values\n")
        show_gains(mean_of_seeds(list(measured.values())), exact)


if __name__ == "__main__":
    main()
