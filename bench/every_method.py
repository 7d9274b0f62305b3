"""Every method on one task, with equal budgets: one row a method, three seeds.

    python bench/every_method.py --to runs/every_method [--only NAME ...] [--minutes 20]
    python bench/every_method.py --page

The task is the default run's: expressions of five terms, from the shipped model, which is the
start. A run takes 24 optimizer steps with 128 completions each: sampled ones, which is 16 problems
with 8 completions or 128 with one, or demonstrations. Rewards are 1 for the right result. Learning
rates are 3e-4, and 1e-4 for the losses of pairs and of scored completions; nothing was tuned. What
methods need beside the budget is made once: a process model, two reward models, a critic, and
answers of the start and of GRPO's model.

Every model answers the same 500 held-out problems with the same random keys: twice at temperature
1, and once greedily. A line of RESULTS is added when a run ends, and what stands there is not run
again. Seed 0 of all methods comes first, then seed 1, so that the table is balanced at any time.
--page writes the page from RESULTS.
"""

from __future__ import annotations

import base64
import collections
import json
import re
import shlex
import shutil
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import arms
import numpy as np

from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown
from tpu_rl.studies import comparison

RESULTS = arms.ROOT / "docs/benchmarks/every_method.jsonl"
PAGE = arms.ROOT / "docs/benchmarks/every_method.md"
STEPS = 24
PROBLEMS = 500
SAMPLES = 2
POOL = 128
"""Problems of the curricula: about three passes over them."""
SEEDS = (0, 1, 2)

GROUPS = "--batch.prompts 16 --batch.group-size 8"
SINGLE = "--batch.prompts 128 --batch.group-size 1"
GRPO = f"arithmetic_grpo {GROUPS}"
REWARDS = f"{GRPO} --evaluation.reward arithmetic --reward"
SURROGATE = f"{GRPO} --algorithm surrogates --algorithm.surrogate"
MIXED = f"{GRPO} --algorithm mixed --algorithm.method"
SLOW = "--optimizer.learning-rate 1e-4"
PAIRS = f"arithmetic_dpo {GROUPS} {SLOW}"
SCORES = (
    f"{SLOW} --batch.row-length 640 --batch.micro-batch-rows 4 "
    "--algorithm scored_completions --algorithm.scores"
)
SCORED = f"{GRPO} {SCORES}"
A_LOL_OF_A_CRITIC = (
    f"arithmetic_grpo {SINGLE} {SCORES} reference --algorithm.loss a_lol "
    "--algorithm.critic {to}/critic/model"
)
DEMONSTRATIONS = (
    f"arithmetic_sft {SINGLE} --model.no-random-init --data.written-share 0.5 "
    "--data.train.min-terms 5 --data.train.length-shares 1 --optimizer.schedule constant"
)
OWN = "--model.path builtin:arithmetic --sampling.max-prompt-tokens 96 --sampling.max-new-tokens 64"
TEXTS = f"sft {SINGLE} {OWN} --optimizer.schedule constant --data.path"
POOLED = f"grpo {GROUPS} {OWN} --reward arithmetic --data.path {{to}}/pool.jsonl"
LIKELIHOOD = f"{GRPO} --rollout.likelihood.mark '#' --rollout.likelihood.coef"
TEACHER = "--algorithm.teacher {to}/grpo_0/model"
SHUFFLED = "bench/shuffled_reward.py:score"


PAIR_LOSSES = (
    *("ipo", "hinge", "robust", "discopop", "apo_zero", "apo_down", "nca", "sppo", "simpo"),
    *("alphapo", "orpo", "bco_pair", "aot"),
)


class Method(NamedTuple):
    """A row of the table."""

    name: str
    flags: str
    """Preset and flags of launch/run.py; {to} is the folder of the runs."""
    ids: str = ""
    """Rows of docs/coverage.tsv that the run shows."""
    is_control: bool = False
    """The method is not expected to gain, or must not."""


METHODS = (
    Method("grpo", GRPO, "B2"),
    # --- group baselines ---
    Method("grpo_paper", f"{GRPO} --algorithm.loss-aggregation sequence_mean", "B2"),
    Method(
        "dr_grpo",
        f"{GRPO} --algorithm.advantages centered --algorithm.loss-aggregation constant_length",
        "B2",
    ),
    Method("dapo", f"{GRPO} --algorithm.clip-high 0.28", "B2"),
    Method(
        "dynamic_sampling",
        "arithmetic_grpo --batch.prompts 8 --batch.group-size 8 "
        "--rollout.dynamic-sampling-rounds 1",
        "B2",
    ),
    Method(
        "dynamic_needed",
        "arithmetic_grpo --batch.prompts 16 --batch.group-size 8 "
        "--rollout.dynamic-sampling-rounds 3 --rollout.dynamic-sampling-size needed",
        "E13",
    ),
    Method(
        "rloo",
        f"{GRPO} --algorithm.advantages leave_one_out --algorithm.kl-reward-coef 0.01",
        "B2",
    ),
    Method("opo", f"{GRPO} --algorithm.advantages opo"),
    Method("token_baseline", f"{GRPO} --algorithm.advantages opo --algorithm.credit token"),
    Method("pass_at_k", f"{GRPO} --algorithm.advantages pass_at_k"),
    Method("pass_at_k_scaled", f"{GRPO} --algorithm.advantages pass_at_k_scaled"),
    Method("max_rl", f"{GRPO} --algorithm.advantages max_rl"),
    Method("batch_scaled", f"{GRPO} --algorithm.advantages batch", "F35"),
    # --- surrogates ---
    Method("gspo", f"{GRPO} --algorithm gspo"),
    Method("cispo", f"{GRPO} --algorithm cispo"),
    Method("clipped", f"{SURROGATE} clipped"),
    Method("stable_reinforce", f"{SURROGATE} stable_reinforce --algorithm.outlier-sigmas 3", "F02"),
    Method("sapo", f"{SURROGATE} sapo --algorithm.loss-aggregation sequence_mean"),
    Method("gmpo", f"{SURROGATE} gmpo --algorithm.loss-aggregation sequence_mean"),
    Method("vespo", f"{SURROGATE} vespo"),
    Method("dppo_tv", f"{SURROGATE} dppo_tv"),
    Method("dppo_kl", f"{SURROGATE} dppo_kl"),
    Method("dro", f"{SURROGATE} dro"),
    Method("gpg", f"{SURROGATE} gpg --algorithm.advantages gpg"),
    Method("clip_cov", f"{SURROGATE} clip_cov"),
    Method("kl_cov", f"{SURROGATE} kl_cov"),
    Method("mastered_tokens", f"{SURROGATE} clipped --algorithm.mastered-entropy 0.2", "F82"),
    Method("success_slope", f"{SURROGATE} clipped --algorithm.success-slope 1"),
    # --- REINFORCE and critics ---
    Method("reinforce_plus", f"arithmetic_reinforce {SINGLE}", "B12 B2"),
    Method("reinforce_baseline", f"arithmetic_reinforce {GROUPS} --algorithm.baseline group"),
    Method(
        "remax",
        f"arithmetic_reinforce {SINGLE} --algorithm.baseline greedy --algorithm.no-whiten "
        "--algorithm.loss-aggregation constant_length",
    ),
    Method("nash_md", f"arithmetic_nash_md {SINGLE}"),
    Method("a_star_po", f"arithmetic_a_star_po {SINGLE}"),
    Method("ppo", f"arithmetic_ppo {SINGLE}", "B1"),
    Method("vc_ppo", f"arithmetic_vc_ppo {SINGLE} --phases.0.until 6", "D14"),
    Method("vapo", f"arithmetic_vapo {GROUPS} --phases.0.until 6"),
    Method(
        "nlpo",
        f"arithmetic_nlpo {SINGLE} --algorithm.kl-reward-coef 0.1 --algorithm.kl-target 0.1 "
        "--algorithm.mask-every 8",
        "F20",
    ),
    Method("ppo_max", f"arithmetic_ppo {SINGLE} --algorithm.normalized-reward-clip 5", "F38"),
    # --- solutions and own successes in groups ---
    Method("chord", f"{MIXED} chord", "F50"),
    Method("relift", f"{MIXED} relift", "E10"),
    Method("luffy", f"{MIXED} luffy"),
    Method("visurf", f"{MIXED} visurf --algorithm.old-log-probs recomputed", "E45"),
    Method("sasr", f"{MIXED} sasr --algorithm.mu-warmup-steps 4", "E05"),
    Method("amft", f"{MIXED} amft --algorithm.mu-peak 0.95", "E54"),
    Method("replay", f"{POOLED} --algorithm mixed --algorithm.method replay", "F59"),
    Method(
        "critique",
        f"{MIXED} critique --algorithm.column answer --algorithm.critique ';{{{{answer}}}};' "
        "--sampling.max-prompt-tokens 128",
        "F64",
    ),
    # --- credit to tokens and steps ---
    Method("prime", f"{GRPO} --algorithm prime --algorithm.advantages leave_one_out"),
    Method(
        "direct_advantage",
        f"{GRPO} --algorithm direct_advantage --algorithm.separators 18 "
        "--reward 'dense(of={to}/process, values=true)'",
        "F71",
    ),
    Method("with_process", f"{REWARDS} arithmetic '0.3*{{to}}/process/model'", "F73"),
    # --- pairs and scored completions ---
    Method("dpo", f"{PAIRS}", "B3"),
    *(Method(name, f"{PAIRS} --algorithm.loss {name}", "B3") for name in PAIR_LOSSES),
    Method("exo", f"{PAIRS} --algorithm.loss exo --algorithm.label-smoothing 0.01", "B3"),
    Method("rpo", f"{PAIRS} --algorithm.rpo-coef 1", "B3"),
    Method("cpo", f"{PAIRS} --algorithm.reference-free --algorithm.rpo-coef 1"),
    Method("wpo", f"{PAIRS} --algorithm.weigh-by-policy"),
    Method("ld_dpo", f"{PAIRS} --algorithm.tail-weight 0.5"),
    Method(
        "mpo",
        f"{PAIRS} --algorithm.loss-weight 0.8 --algorithm.further-losses 0.2*bco_pair "
        "--algorithm.rpo-coef 1",
    ),
    Method("worst_case_dpo", f"{PAIRS} --algorithm.robust-radius 0.2", "D21"),
    Method("tr_dpo", f"{PAIRS} --algorithm.reference-mix 0.6 --algorithm.reference-every 6"),
    Method("online_dpo", f"{PAIRS} --algorithm.pairs policy", "F81"),
    Method("xpo", f"arithmetic_xpo {GROUPS} {SLOW}", "F04"),
    Method("kto", f"arithmetic_bco {GROUPS} {SLOW} --algorithm.loss kto"),
    Method("bco", f"arithmetic_bco {GROUPS} {SLOW}"),
    Method("rrhf", f"{SCORED} reference --algorithm.loss rrhf", "B9"),
    Method("rrhf_own", f"{SCORED} policy --algorithm.loss rrhf", "F96"),
    Method("tpo", f"{SCORED} reference --algorithm.loss tpo"),
    Method("prdp", f"{SCORED} reference --algorithm.loss prdp", "F42"),
    Method("a_lol", f"{SCORED} reference --algorithm.loss a_lol", "E35"),
    Method("a_lol_value", A_LOL_OF_A_CRITIC, "E35"),
    Method("a_lol_priority", f"{A_LOL_OF_A_CRITIC} --algorithm.priority 1", "E35"),
    # --- imitation ---
    Method("sft", DEMONSTRATIONS, "B4"),
    Method("dft", f"{DEMONSTRATIONS} --algorithm.loss dft"),
    Method("ift", f"{DEMONSTRATIONS} --algorithm.loss ift", "E12"),
    Method("sft_kl", f"{DEMONSTRATIONS} --algorithm.kl-coef 0.1", "E24"),
    Method("sft_authored", f"{TEXTS} {{to}}/authored.jsonl", "B4"),
    Method("pear", f"{TEXTS} {{to}}/authored.jsonl --algorithm.author {{to}}/grpo_0/model", "E03"),
    Method("critique_sft", f"{TEXTS} {{to}}/critiques.jsonl", "F10"),
    Method("ce_u", f"{TEXTS} {{to}}/judged.jsonl --algorithm unlearn", "D17"),
    Method("rft", f"{GRPO} --algorithm rft --algorithm.max-per-prompt 1", "B8"),
    Method("rft_all", f"{GRPO} --algorithm rft", "B8"),
    Method(
        "expert_iteration",
        f"{GRPO} --algorithm rft --algorithm.max-per-prompt 1 "
        "--algorithm.sampled-by reference --algorithm.round-steps 6",
        "B8",
    ),
    Method(
        "self_distill",
        f"arithmetic_grpo {SINGLE} --algorithm self_distill "
        "--algorithm.template '{{hint}};{{prompt}}'",
    ),
    Method(
        "self_distill_moving",
        f"arithmetic_grpo {SINGLE} --algorithm self_distill "
        "--algorithm.template '{{hint}};{{prompt}}' --algorithm.reference-mix 0.05",
    ),
    Method("distill", f"arithmetic_gkd {SINGLE} {TEACHER}", "B6"),
    Method(
        "distill_forward",
        f"arithmetic_gkd {SINGLE} {TEACHER} --algorithm.on-policy 0 "
        "--algorithm.off-policy teacher --algorithm.beta 0",
        "B6",
    ),
    Method("sequence_distill", f"arithmetic_sequence_distil {SINGLE} {TEACHER}", "B6"),
    Method("mini_llm", f"arithmetic_mini_llm {SINGLE} {TEACHER}", "B6"),
    # --- rewards ---
    Method("gain", f"{LIKELIHOOD} 1 --reward 0*arithmetic", "F29"),
    Method(
        "spread",
        f"{LIKELIHOOD} 1 --rollout.likelihood.form spread --reward 0*arithmetic "
        "--rollout.keep-variance-share 0.75",
        "F84",
    ),
    Method(
        "consistent",
        f"{LIKELIHOOD} 0.5 --rollout.likelihood.form consistent "
        "--rollout.likelihood.by reference --algorithm.kl-loss-coef 0.001 "
        "--algorithm.reference-reset-every 10",
        "F55",
    ),
    Method("cosine_length", f"{REWARDS} 'cosine_length(of=arithmetic,max_tokens=64)'", "E38"),
    Method("effort", f"{REWARDS} arithmetic '0.1*effort(max_tokens=64)'", "F25"),
    Method("easy_length", f"{REWARDS} 'easy_length(of=arithmetic)'", "F93"),
    Method("gated", f"{REWARDS} arithmetic '0.3*effort(max_tokens=64)?arithmetic>0.5'", "F19"),
    Method(
        "length_limit",
        f"{GRPO} --rollout.constraints 'length<=16' --rollout.constraint-rate 0.001",
        "F14",
    ),
    Method("judge", f"{REWARDS} {{to}}/judge/model", "B5 F22"),
    Method("judge_and_verifier", f"{REWARDS} arithmetic '0.2*{{to}}/judge/model'", "E18"),
    Method("robust_judge", f"{REWARDS} {{to}}/robust_judge/model", "F06"),
    Method("majority", f"{REWARDS} 'majority(of=arithmetic)'", "F34"),
    Method(
        "two_rewards",
        f"{REWARDS} arithmetic arithmetic_well_formed "
        "--rollout.normalize-rewards --algorithm.advantages batch",
    ),
    # --- entropy, KL, filters ---
    Method("entropy_bonus", f"{GRPO} --algorithm.entropy-coef 0.01", "F33"),
    Method("sampled_entropy", f"{GRPO} --algorithm.sampled-entropy 0.3", "E19"),
    Method("top_entropy", f"{GRPO} --algorithm.top-entropy-quantile 0.2"),
    Method(
        "kl_reset",
        f"{GRPO} --algorithm.kl-loss-coef 0.01 --algorithm.reference-reset-every 8",
    ),
    Method(
        "prorl",
        f"{GRPO} --algorithm.kl-loss-coef 0.01 --algorithm.reference-reset-every 8 "
        "--optimizer.reset-every 8",
        "F54",
    ),
    Method(
        "robust_groups", f"{GRPO} --algorithm.robust-radius 0.5 --algorithm.robust-ball kl", "D21"
    ),
    Method("keep_variance", f"{GRPO} --rollout.keep-variance-share 0.5"),
    # --- older samples ---
    Method(
        "stale",
        f"{GRPO} --batch.staleness 4 --algorithm.old-log-probs recomputed "
        "--algorithm.importance-sampling-cap 2",
        "F05",
    ),
    Method(
        "stale_cispo",
        f"{GRPO} --algorithm cispo --batch.staleness 4 --algorithm.clip-high 4",
        "F86",
    ),
    # --- curricula ---
    Method("pool", POOLED),
    Method("pass_rate", f"{POOLED} --rollout.curriculum.pass-rate 0.1 0.9", "E06"),
    Method("impact", f"{POOLED} --rollout.curriculum.impact 0.6", "E53"),
    Method(
        "hints",
        f"{POOLED} --rollout.curriculum.hints --rollout.curriculum.separator ';'",
        "F46",
    ),
    Method(
        "starts",
        f"{GRPO} --rollout.curriculum.start 0.75 0 --rollout.curriculum.start-batches 12 "
        "--rollout.curriculum.separator ';' --sampling.max-prompt-tokens 96",
        "F01",
    ),
    Method(
        "reward_by_kind",
        f"grpo {GROUPS} {OWN} --data.path {{to}}/pool.jsonl --reward "
        "'for_rows(of=arithmetic,column=kind,values=sum)' "
        "'for_rows(of=arithmetic,column=kind,values=product)'",
        "E31",
    ),
    # --- turns ---
    Method(
        "self_verify",
        f"{GRPO} --environment self_verify --reward --sampling.max-turns 2 "
        "--sampling.max-observation-tokens 8 --sampling.max-new-tokens 96 "
        "--algorithm.credit turn --algorithm.gamma 0",
        "F21",
    ),
    # --- controls ---
    Method("shuffled", f"{REWARDS} {SHUFFLED}", "", True),
    Method("inverted", f"{REWARDS} -1*arithmetic", "F34", True),
    Method("coin", f"{REWARDS} coin", "F34", True),
    Method("well_formed", f"{REWARDS} arithmetic_well_formed", "F34", True),
    Method("shuffled_dpo", f"{PAIRS} --reward {SHUFFLED}", "", True),
    Method("reverse_dpo", f"{PAIRS} --algorithm.reverse", "", True),
    Method(
        "shuffled_rft",
        f"{GRPO} --algorithm rft --algorithm.max-per-prompt 1 --reward {SHUFFLED}",
        "",
        True,
    ),
    Method(
        "shuffled_prdp", f"{SCORED} reference --algorithm.loss prdp --reward {SHUFFLED}", "", True
    ),
    Method("shuffled_sft", f"{TEXTS} {{to}}/shuffled.jsonl", "", True),
    Method(
        "gradient_ascent",
        f"{TEXTS} {{to}}/judged.jsonl --algorithm unlearn --algorithm.loss gradient_ascent",
        "D17",
        True,
    ),
)


class Study(NamedTuple):
    """What all runs of a folder share."""

    folder: Path
    problems: list[Any]
    settings: Any
    """The configuration whose reward and lengths judge the answers."""


def open_study(folder: Path) -> Study:
    """Return the held-out problems."""
    from tpu_rl.commands import config
    from tpu_rl.commands.recipe import answers

    folder.mkdir(parents=True, exist_ok=True)
    settings = config.parse(["arithmetic_grpo", "--evaluation.rows", str(PROBLEMS)])
    return Study(folder, answers.problems_of(settings, is_whole=False), settings)


def train(study: Study, flags: str, run_dir: Path, seed: int, steps: int = STEPS) -> None:
    """Run launch/run.py in this process; programs that runs share are compiled once."""
    from tpu_rl.commands import config, run

    argv = shlex.split(flags.format(to=study.folder))
    common = {
        "--optimizer.learning-rate": "3e-4",
        "--optimizer.warmup-steps": "2",
        "--evaluation.rows": "0",
        "--checkpoint.interval": "1000",
        "--steps": str(steps),
    }
    for name, value in common.items():
        argv += [] if name in argv else [name, value]
    settings = config.parse([*argv, "--seed", str(seed), "--run-dir", str(run_dir)])
    run.start(settings, "the same command")


def judged(study: Study, model: str) -> dict[str, str]:
    """Return which answers of a model are right: sampled ones and greedy ones, as packed bits."""
    from tpu_rl.commands.recipe import answers

    loaded = answers.load_model(model, study.settings)
    kinds = {"sampled": (SAMPLES, 1.0), "greedy": (1, 0.0)}
    return {
        name: packed(
            answers.evaluate(study.settings, *loaded, study.problems, samples, temperature).rewards
            > 0.5
        )
        for name, (samples, temperature) in kinds.items()
    }


def packed(right: np.ndarray) -> str:
    """Return an array of bool [n, k] as text."""
    return base64.b64encode(np.packbits(right, axis=None).tobytes()).decode()


def unpacked(text: str, samples: int) -> np.ndarray:
    """Return the share of right answers to each problem, [n]."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))
    return bits[: PROBLEMS * samples].reshape(PROBLEMS, samples).mean(1)


def prepare(study: Study, small: bool) -> None:
    """Make what methods need beside the budget, unless it is there."""
    from tpu_rl.commands.recipe import answers
    from tpu_rl.tasks import arithmetic

    models = {
        "process": "arithmetic_process_reward --algorithm.steps monte_carlo",
        "judge": "arithmetic_reward_model",
        "critic": "arithmetic_grpo --algorithm value_pretraining",
        "robust_judge": "arithmetic_reward_model --algorithm.heads 4 --algorithm.deviations "
        "--algorithm.worst-share 0.5",
    }
    for name, flags in models.items():
        if not (study.folder / name / "summary.json").exists():
            flags += " --batch.prompts 16 --batch.group-size 8 --optimizer.learning-rate 1e-3"
            train(study, flags, study.folder / name, 0, 1 if small else 60)
    source = arithmetic.ArithmeticSource(study.settings.data.train, "train", seed=100)
    rows = [source[i] for i in range(3200)]
    pool = [row | {"kind": "product" if "*" in row["prompt"] else "sum"} for row in rows[:POOL]]
    write(study.folder / "pool.jsonl", pool)
    shuffled = [
        {"prompt": row["prompt"], "completion": other["solution"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    write(study.folder / "shuffled.jsonl", shuffled)
    if (study.folder / "critiques.jsonl").exists():
        return
    loaded = answers.load_model("builtin:arithmetic", study.settings)
    of_start = answers.evaluate(study.settings, *loaded, rows[: 32 if small else 400], 8)
    given = [
        (row, text, reward > 0.5)
        for row, texts, rewards in zip(
            rows, of_start.completions, of_start.rewards.tolist(), strict=False
        )
        for text, reward in zip(texts, rewards, strict=True)
    ]
    judgments = [
        {"prompt": row["prompt"], "completion": text, "forget": not right}
        for row, text, right in given
    ]
    write(study.folder / "judged.jsonl", judgments)
    critiques = [
        {"prompt": f"{row['prompt']}{text};", "completion": row["solution"]}
        for row, text, _ in given
    ]
    write(study.folder / "critiques.jsonl", critiques)


def author(study: Study) -> None:
    """Write answers of GRPO's model to training problems, unless they are there."""
    from tpu_rl.commands.recipe import answers
    from tpu_rl.tasks import arithmetic

    path = study.folder / "authored.jsonl"
    if path.exists():
        return
    source = arithmetic.ArithmeticSource(study.settings.data.train, "train", seed=101)
    rows = [source[i] for i in range(3200)]
    loaded = answers.load_model(str(study.folder / "grpo_0/model"), study.settings)
    texts = answers.evaluate(study.settings, *loaded, rows, 1).completions
    write(
        path,
        [
            {"prompt": row["prompt"], "completion": text}
            for row, (text,) in zip(rows, texts, strict=True)
        ],
    )


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_all(study: Study, results: Path, names: list[str], minutes: float, small: bool) -> None:
    """Run what has no line in `results`, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    prepare(study, small)
    done = {(line["name"], line["seed"]) for line in arms.read_lines(results)}
    by_name = {method.name: method for method in METHODS}
    chosen = [by_name[name] for name in names] or METHODS

    def add(name: str, seed: int, **measured: Any) -> None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "seed": seed, **measured}) + "\n")

    if ("start", 0) not in done:
        add("start", 0, **judged(study, "builtin:arithmetic"), seconds=0)
    for seed in SEEDS[: 1 if small else None]:
        for method in chosen:
            if (method.name, seed) in done:
                continue
            if time.monotonic() > deadline:
                return
            run_dir = study.folder / f"{method.name}_{seed}"
            # A run that broke off may have had other settings.
            shutil.rmtree(run_dir, ignore_errors=True)
            start = time.monotonic()
            try:
                train(study, method.flags, run_dir, seed, 1 if small else STEPS)
                seconds = round(time.monotonic() - start, 1)
                tokens = sum(row.get("rollout/tokens", 0) for row in arms.read_metrics(run_dir))
                measured = judged(study, str(run_dir / "model"))
            except Exception:
                traceback.print_exc()
                print(f"FAILED {method.name} {seed}", flush=True)
                if small:
                    raise
                continue
            add(method.name, seed, **measured, seconds=seconds, tokens=int(tokens))
            share = unpacked(measured["sampled"], SAMPLES).mean()
            print(f"DONE {method.name} {seed} {share:.3f} {seconds}", flush=True)
            if (method.name, seed) == ("grpo", 0):
                author(study)


# --- the page ---

HEAD = """# Every method on one task

This page is generated: `python bench/every_method.py --page` writes it from `every_method.jsonl`
beside it, to which `python bench/every_method.py --to runs/every_method` adds. Measured on 29 and
30 November 2026 on 2 CPU cores that did other work too, so that seconds are upper bounds.

Every method begins with the shipped model and takes {steps} optimizer steps of 128 completions, at
a learning rate of 3e-4, or 1e-4 for losses of pairs and of scored completions. No method was tuned,
and {steps} steps are a short run: the table shows that a mechanism moves the model, and which way.
It does not rank methods: what another learning rate, task or length would give is open. Each batch
has one update, so that ratios begin at 1: there several surrogates (clipped, cispo, vespo, dppo,
dro) have the gradient of GRPO, and give its model.

All models answer the same {problems} held-out expressions of five terms with the same random keys,
{samples} times at temperature 1 and once greedily. Differences are points, paired on problems and,
against GRPO, on seeds. The first interval is over problems, for these very models. The second is
over seeds, and a claim about a method needs it ("-" with one seed). Seconds and sampled tokens are
means of a run, compilation included. Methods without tokens learn from texts or from pairs, whose
sampling is in the seconds.

{counts} Methods that are missing have not run yet. No result was left out, but for a first run of
`replay` on problems that never repeat, which was GRPO's to the bit.
"""

SETTINGS = """## Settings

Preset and flags of `launch/run.py`, beside the learning rate above. The folder has what the script
made first: a process model, two reward models and a critic (60 steps each), answers of the start to
400 problems, of which `judged.jsonl` marks the wrong ones and `critiques.jsonl` adds the worked
solution to each, and answers of GRPO's model (`authored.jsonl`). Demonstrations are half worked
solutions and half bare results; those of `shuffled.jsonl` belong to other problems. Curricula draw
from 128 problems, as `pool` does, with which they are to be compared.
"""


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the page."""
    results = {(line["name"], line["seed"]): line for line in lines}
    start = results["start", 0]
    finished = {
        method: [seed for seed in SEEDS if (method.name, seed) in results] for method in METHODS
    }
    counts = collections.Counter(len(seeds) for seeds in finished.values())
    words = {3: "three seeds", 2: "two seeds", 1: "one seed", 0: "none"}
    text = ", ".join(f"{counts[n]} methods have {words[n]}" for n in words if counts[n])
    sections = [
        HEAD.format(steps=STEPS, problems=PROBLEMS, samples=SAMPLES, counts=f"So far {text}.")
    ]
    begins = [
        f"{100 * unpacked(start[kind], k).mean():.1f} % {kind}"
        for kind, k in (("sampled", SAMPLES), ("greedy", 1))
    ]
    sections.append(f"The start: {', '.join(begins)}.\n")
    columns = [
        *("method", "shows", "seeds", "sampled, %", "greedy, %", "against the start", "over seeds"),
        *("against GRPO", "over seeds", "seconds", "tokens"),
    ]
    for title, is_control in (("Methods", False), ("Controls", True)):
        rows = []
        for method, seeds in finished.items():
            if method.is_control != is_control or not seeds:
                continue
            runs = [results[method.name, seed] for seed in seeds]
            known = [seed for seed in seeds if ("grpo", seed) in results]
            own = [results[method.name, seed] for seed in known]
            others = [results["grpo", seed] for seed in known]
            rows.append(
                [
                    method.name,
                    " ".join(method.ids.split()) or "-",
                    len(seeds),
                    f"{100 * mean(runs, 'sampled', SAMPLES).mean():.1f}",
                    f"{100 * mean(runs, 'greedy', 1).mean():.1f}",
                    *differences([start] * len(runs), runs),
                    *(("-", "-") if method.name == "grpo" else differences(others, own)),
                    round(np.mean([line["seconds"] for line in runs])),
                    f"{np.mean([line['tokens'] for line in runs]):,.0f}",
                ]
            )
        sections.append(f"## {title}\n\n{counted(rows)}\n\n{markdown.table(columns, rows)}\n")
    listing = [
        f"{method.name:20} {method.flags.format(to='runs/every_method')}"
        for method, seeds in finished.items()
        if seeds
    ]
    sections.append(f"{SETTINGS}\n```\n" + "\n".join(listing) + "\n```\n")
    return "\n".join(sections)


def counted(rows: list[list[Any]]) -> str:
    """Say how many of the table's rows end above the start, and how many below.

    The interval over problems, of the sixth column, decides.
    """
    intervals_of = [row[5].partition("(")[2] for row in rows]
    bounds = [[float(word) for word in re.findall(r"[+-][\d.]+", text)] for text in intervals_of]
    above = sum(low > 0 for low, _ in bounds)
    below = sum(high < 0 for _, high in bounds)
    return (
        f"Of {len(rows)}, {above} end above the start, {below} below it, and of "
        f"{len(rows) - above - below} this cannot be told, by the interval over problems."
    )


def mean(runs: list[dict[str, Any]], kind: str, samples: int) -> np.ndarray:
    """Return each problem's share of right answers over runs, [n]."""
    return np.mean([unpacked(line[kind], samples) for line in runs], axis=0)


def differences(base: list[dict[str, Any]], runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the difference with its interval over problems, and the interval over seeds."""
    if not runs:
        return "-", "-"
    a, b = (mean(lines, "sampled", SAMPLES) for lines in (base, runs))
    over_problems = comparison.paired_difference(a, b)
    by_seed = [
        float(np.mean(unpacked(y["sampled"], SAMPLES) - unpacked(x["sampled"], SAMPLES)))
        for x, y in zip(base, runs, strict=True)
    ]
    over_seeds = intervals.mean_estimate(by_seed)
    low, high = 100 * over_seeds.low, 100 * over_seeds.high
    shown = "-" if np.isnan(low) else f"{low:+.1f} to {high:+.1f}"
    value, low, high = (100 * number for number in over_problems[:3])
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})", shown


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/every_method"))
    parser.add_argument("--only", nargs="+", default=[], help="methods, in this order")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    parser.add_argument("--small", action="store_true", help="one step; results stay in --to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.page:
        PAGE.write_text(summarize(arms.read_lines(RESULTS)), encoding="utf-8")
        return
    study = open_study(flags.to)
    results = flags.to / "results.jsonl" if flags.small else RESULTS
    run_all(study, results, flags.only, flags.minutes, flags.small)


if __name__ == "__main__":
    main()
