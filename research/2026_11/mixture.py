"""GRPO against GSPO on a trained mixture of experts, with and without replay of routing.

    python research/2026_11/mixture.py --to runs/mixture [--seeds 0 1 2] [--arms grpo_fp8 ...]

A mixture of a million weights is made of the shipped model (sparse upcycling, arXiv 2212.05055,
with different experts as in arXiv 2502.19261): each of 8 experts has 96 random units of the dense
layer's 256, two process a token, and the router is random. It then learns arithmetic (the preset
arithmetic_sft). GRPO and GSPO train the result with two updates a batch. The sampler rounds its
weights to eight bits, so that its routers choose other experts for some tokens than the update
does; replay lets the update use the sampler's. --routing measures, for each kind of sampler, the
share of tokens and layers whose set of experts differs from that of the float32 model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import arms
import demos
import numpy as np
from mismatch import right_answers
from safetensors.numpy import load_file, save_file
from weight_gap import quantized

from tpu_rl import models, sampler
from tpu_rl.commands import roles
from tpu_rl.environments import arithmetic
from tpu_rl.report import plots
from tpu_rl.report.series import Series
from tpu_rl.sampler import SamplerConfig
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import Purpose

EXPERTS, SIZE, LAYERS = 8, 96, 3
SHARED = (
    "rms_norm_eps",
    "rope_theta",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "vocab_size",
)
SHARED += ("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
SHARED += ("hidden_size", "num_hidden_layers", "max_position_embeddings")
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "intermediate_size": SIZE,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
SFT = (
    *("arithmetic_sft", "--model.remat", "none", "--model.router-balance", "0.01"),
    *("--batch.prompts", "64", "--batch.micro-batch-rows", "4"),
    *("--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "20"),
    *("--steps", "300", "--evaluation.interval", "100", "--checkpoint.interval", "100"),
)
COMMON = (
    *("--optimizer.learning-rate", "3e-4", "--batch.num-minibatches", "2"),
    *("--batch.prompts", "16", "--batch.micro-batch-rows", "2", "--model.remat", "none"),
    *("--steps", "40", "--evaluation.interval", "20", "--checkpoint.interval", "40"),
)
FP8 = ("--sampling.weight-dtype", "float8_e4m3fn")
REPLAY = "--rollout.replay-routing"
ARMS = {
    f"{method}{name}": (f"arithmetic_{method}", *flags)
    for method in ("grpo", "gspo")
    for name, flags in {"_fp8": FP8, "_fp8_replay": (*FP8, REPLAY)}.items()
}
SAMPLERS = ("float32", "int8", "float8_e4m3fn", "bfloat16")


def upcycle(to: Path) -> None:
    """Write the mixture that is made of the shipped model."""
    builtin = Path(roles.model_path("builtin:arithmetic"))
    to.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, to / name)
    dense = json.loads((builtin / "config.json").read_text(encoding="utf-8"))
    config = CONFIG | {name: dense[name] for name in SHARED}
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = load_file(builtin / "model.safetensors")
    noise = np.random.default_rng(0)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        stored = {name: weights.pop(f"{start}mlp.{name}.weight") for name in MATRICES}
        units = len(stored["gate_proj"])
        moe = f"{start}block_sparse_moe."
        router = noise.normal(0, 0.05, (EXPERTS, stored["gate_proj"].shape[1]))
        weights[f"{moe}gate.weight"] = router.astype(np.float32)
        for expert in range(EXPERTS):
            some = np.sort(noise.permutation(units)[:SIZE])
            for name, short in MATRICES.items():
                matrix = stored[name]
                # The expectation of an expert's output is the dense layer's.
                part = matrix[:, some] * (units / SIZE) if name == "down_proj" else matrix[some]
                weights[f"{moe}experts.{expert}.{short}.weight"] = np.ascontiguousarray(part)
    save_file(weights, to / "model.safetensors")


def pretrain(to: Path) -> Path:
    """Make the mixture, train it on demonstrations, and return its directory."""
    start = to / "upcycled"
    if not start.exists():
        upcycle(start)
    flags = [*SFT, "--model.path", start, "--model.no-random-init"]
    demos.train(to / "sft", flags)
    for row in arms.read_metrics(to / "sft"):
        if "eval/accuracy" in row:
            print(f"step {row['step']}: {arms.percent(arms.estimate(row))}", flush=True)
    return to / "sft" / "model"


def routing(model: Any, params: Any, texts: list[list[int]]) -> np.ndarray:
    """Return the experts [texts, tokens, layers, k] of the tokens of texts."""
    config = SamplerConfig(max_new_tokens=1, record_routing=True)
    policy = models.policy(models.variant(model, records_routing=True))
    rollout = sampler.sample(
        policy, params, texts, sampler.run_key(0, Purpose.EVALUATION, 2), config
    )
    chosen = np.asarray(rollout.routing)
    return chosen.reshape(*chosen.shape[:2], LAYERS, -1)


def compare_routing(directory: Path) -> None:
    """Print the share of tokens and layers whose experts differ from those of the float32 model."""
    tokenizer = load_tokenizer(directory)
    long = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
    source = arithmetic.ArithmeticSource(long, "eval", 0)
    model, params = models.load(str(directory))
    prompts = [source[index]["prompt"] for index in range(200)]
    rollout = demos.sample(model, params, tokenizer, prompts, 1)
    lengths = np.asarray(rollout.action_mask).shape[1] - np.asarray(rollout.action_mask)[
        :, ::-1
    ].argmax(1)
    texts = [
        row[:length].tolist()
        for row, length in zip(np.asarray(rollout.tokens), lengths, strict=True)
    ]
    written = np.arange(max(lengths))[None] < lengths[:, None]
    of_float32 = np.sort(routing(model, params, texts)[:, : max(lengths)], -1)
    # The record counts experts from 1; 0 is a token without a record.
    usage = (
        np.bincount(of_float32[written].ravel(), minlength=EXPERTS + 1)[1:]
        / of_float32[written].size
    )
    print(f"share of each expert, all layers: {', '.join(f'{100 * u:.0f}' for u in usage)} %")
    arms.print_heading("sampler", "tokens and layers whose experts differ", "tokens with any")
    for dtype in SAMPLERS[1:]:
        if dtype == "bfloat16":
            other, weights = models.load(str(directory), dtype=dtype)
        else:
            other, weights = quantized(model, params, dtype)
        chosen = np.sort(routing(other, weights, texts)[:, : max(lengths)], -1)
        differ = (chosen != of_float32).any(-1)[written]
        arms.print_row(dtype, f"{differ.mean():.2%}", f"{differ.any(-1).mean():.2%}")


def report(to: Path, start: Path, seeds: list[int], chosen: list[str], svg: Path | None) -> None:
    """Print accuracies, gaps and paired differences, and draw accuracies over steps."""
    columns = [*(f"seed {seed}" for seed in seeds), "mean gap, nats", "largest", "clipped, %"]
    arms.print_heading("arm", *columns)
    answers, lines = {}, []
    for arm in chosen:
        runs = [arms.read_metrics(to / f"{arm}_{seed}") for seed in seeds]
        evaluated = [[row for row in run if "eval/accuracy" in row] for run in runs]
        values = np.array([[row["eval/accuracy"] for row in run] for run in evaluated])
        steps = [row for run in runs for row in run if row["step"] > 0]
        gap = np.mean([row["policy/log_prob_gap_mean"] for row in steps])
        largest = np.max([row["policy/log_prob_gap_max"] for row in steps])
        clipped = np.mean([row["policy/clip_low"] + row["policy/clip_high"] for row in steps])
        last = [f"{100 * value:.1f}" for value in values[:, -1]]
        arms.print_row(arm, *last, f"{gap:.1e}", f"{largest:.1e}", f"{100 * clipped:.2f}")
        answers[arm] = np.array([right_answers(str(to / f"{arm}_{seed}/model")) for seed in seeds])
        at = np.array([row["step"] for row in evaluated[0]])
        lines.append(Series(arm, at, values.mean(0), values.min(0), values.max(0)))
    before = right_answers(str(start))
    print(f"\nstart, the same problems: {100 * before.mean():.1f} %\n")
    arms.print_heading("difference", "mean", "seeds")
    for method in ("grpo", "gspo"):
        show_pair(answers, f"{method}_fp8_replay", f"{method}_fp8")
    for name in ("_fp8", "_fp8_replay"):
        show_pair(answers, f"gspo{name}", f"grpo{name}")
    if svg:
        svg.write_text(plots.as_svg(plots.line_chart(lines, size=plots.WIDE, percent=True)))


def show_pair(answers: dict[str, np.ndarray], first: str, second: str) -> None:
    """Print the paired difference of two arms, if both were run."""
    if first in answers and second in answers:
        difference = answers[first] - answers[second]
        each = ", ".join(f"{100 * value:+.1f}" for value in difference.mean(-1))
        arms.print_row(f"{first} - {second}", demos.paired(difference), each)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument(
        "--routing", action="store_true", help="also compare the routing of samplers"
    )
    parser.add_argument("--report", action="store_true", help="only the runs that are finished")
    parser.add_argument("flags", nargs="*", help="further flags of launch/run.py, after --")
    options = parser.parse_args()
    model = pretrain(options.to)
    if options.routing:
        compare_routing(model)
    if not options.report:
        for seed in options.seeds:
            for arm in options.arms:
                flags = [*ARMS[arm], *COMMON, "--model.path", model, "--seed", seed]
                demos.train(options.to / f"{arm}_{seed}", [*flags, *options.flags])
    else:
        report(options.to, model, options.seeds, options.arms, options.svg)


if __name__ == "__main__":
    main()
