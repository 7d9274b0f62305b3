"""A verifier with three verdicts, trained on rows of recipes/judge_rows.py: F1 of each verdict.

    python bench/three_verdicts.py --to runs/three_verdicts

The arithmetic model that comes with the package answers expressions of five terms, and a rule says
which answers are right. recipes/judge_rows.py --invalid makes rows of three verdicts of them, which
train a model with random weights by `sft`. `judge(model=DIR, invalid=none)` then judges answers to
held-out problems, spoiled in the same way. Lines of RESULTS are not measured again.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arms
import every_reward
import numpy as np

sys.path.insert(0, str(arms.ROOT))

from recipes import judge_rows
from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown
from tpu_rl.studies import verifier_bench

RESULTS = arms.ROOT / "docs/benchmarks/data/three_verdicts.jsonl"
SEEDS = (0, 1, 2)
STEPS = 300
KINDS = "CIX"
"""Letters of `verifier_bench.KINDS`: correct, incorrect and invalid."""
TYPES = ("negative", "one digit", "several digits")
"""Kinds of reference answers, with different first letters."""
TYPE_OF = {name[0]: name for name in TYPES}
SIZES = {"train": 8000, "held_out": 500}
"""Problems, each with one answer."""
MODEL = every_reward.MODEL | {"max_position_embeddings": 512}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}\nReply:"
    "{% endif %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}\nReply:{% endif %}"
)
SFT = (
    "sft --model.path {to}/base --model.random-init --data.path {to}/judge.jsonl "
    "--batch.prompts 64 --optimizer.learning-rate 3e-3 --optimizer.warmup-steps 20 --steps {steps} "
    "--sampling.max-prompt-tokens 320 --sampling.max-new-tokens 4 --batch.row-length 384 "
    "--batch.micro-batch-rows 4 --model.remat none --evaluation.rows 0 --checkpoint.interval 1000"
)
PARTS = r" [0-9a-f]{8}\b| ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]"
"""A mark, a word, a digit, or another character."""


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def answer_type(answer: str) -> str:
    """Name the kind of a number."""
    if answer.startswith("-"):
        return TYPES[0]
    return TYPES[1] if len(answer) == 1 else TYPES[2]


def write_rows(folder: Path, divisor: int) -> None:
    """Write labeled answers to problems of both splits, and the rows that train a judge.

    Args:
        folder: the folder of the files.
        divisor: of the numbers of problems.
    """
    from tpu_rl.commands import config
    from tpu_rl.commands.recipe import answers
    from tpu_rl.tasks import arithmetic

    settings = config.parse(["arithmetic_grpo", "--evaluation.rows", str(SIZES["held_out"])])
    source = arithmetic.ArithmeticSource(settings.data.train, "train", seed=100)
    problems = {
        "train": [source[i] for i in range(SIZES["train"] // divisor)],
        "held_out": answers.problems_of(settings, is_whole=False)[: SIZES["held_out"] // divisor],
    }
    loaded = answers.load_model("builtin:arithmetic", settings)
    rng = random.Random(0)
    for split, rows in problems.items():
        of_model = answers.evaluate(settings, *loaded, rows, 1)
        labeled = [
            {
                "prompt": row["prompt"],
                "completion": text,
                "answer": str(row["answer"]),
                "label": int(reward > 0.5),
                "answer_type": answer_type(str(row["answer"])),
            }
            for row, (text,), (reward,) in zip(
                rows, of_model.completions, of_model.rewards.tolist(), strict=True
            )
        ]
        write(folder / f"{split}.jsonl", labeled)
        labeled += [judge_rows.spoiled(row, rng) for row in labeled]
        write(folder / f"{split}_spoiled.jsonl", labeled)
    command = [sys.executable, str(arms.ROOT / "recipes/judge_rows.py"), "--invalid"]
    files = [str(folder / "train.jsonl"), "--to", str(folder / "judge.jsonl")]
    subprocess.run([*command, *files], check=True)


def save_base(folder: Path) -> None:
    """Save a model with random weights, whose tokens are words, digits and other characters."""
    import jax
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    from tpu_rl import models, tokenizers

    rows = map(json.loads, (folder / "judge.jsonl").open())
    counts: dict[str, int] = {}
    for row in rows:
        for word in set(re.findall(PARTS, row["prompt"][0]["content"])):
            counts[word] = counts.get(word, 0) + 1
    # The marks around the texts are all different, and one token.
    words = {word for word, count in counts.items() if count >= 40} | set(string.printable)
    words |= {"Reply", *judge_rows.LABELS.values()}
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *sorted(words)])}
    model = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(PARTS), "isolated")
    model.decoder = fast.decoders.Fuse()
    (folder / "words").mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=TEMPLATE, **special)
    tokenizer.save_pretrained(folder / "words")
    policy = models.from_config(MODEL | {"vocab_size": len(vocabulary)})
    loaded = tokenizers.load(folder / "words")
    models.save(str(folder / "base"), policy, policy.init(jax.random.key(0)), loaded)


def judged(folder: Path, model: Path) -> str:
    """Return the verdicts on the held-out rows, as letters of `KINDS`."""
    from tpu_rl import rewards
    from tpu_rl.rewards import registry

    rows = arms.read_lines(folder / "held_out_spoiled.jsonl")
    prompts = [row["prompt"] for row in rows]
    answers = rewards.as_answers(prompts, [row["completion"] for row in rows])
    function = registry.resolve(f"judge(model={model}, invalid=none)")
    columns = {"answer": [row["answer"] for row in rows]}
    values = rewards.apply("judge", function, prompts, answers, columns)[0]
    return "".join(KINDS[kind] for kind in verifier_bench.kinds(values))


def measure(folder: Path, small: bool) -> None:
    """Train and judge with each seed that has no line in the results."""
    from tpu_rl.commands import config, run

    results = folder / "results.jsonl" if small else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base").exists():
        write_rows(folder, 20 if small else 1)
        save_base(folder)
    rows = arms.read_lines(folder / "held_out_spoiled.jsonl")
    done = {line["seed"] for line in arms.read_lines(results)}
    for seed in SEEDS[: 1 if small else None]:
        if seed in done:
            continue
        run_dir = folder / f"seed_{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        start = time.monotonic()
        flags = shlex.split(SFT.format(to=folder, steps=1 if small else STEPS))
        seeded = [*flags, "--seed", str(seed), "--run-dir", str(run_dir)]
        run.start(config.parse(seeded), "the same command")
        line = {
            "seed": seed,
            "seconds": round(time.monotonic() - start, 1),
            "labels": "".join(letter_of(row["label"]) for row in rows),
            "types": "".join(row["answer_type"][0] for row in rows),
            "verdicts": judged(folder, run_dir / "model"),
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def letter_of(label: int | str) -> str:
    """Return the letter of a label."""
    return KINDS[2 if label == "invalid" else 1 - int(label)]


def f1_of(labels: str, verdicts: str) -> list[float]:
    """Return F1 = 2 tp / (2 tp + fp + fn) of each kind, and their mean."""
    counts = np.zeros((3, 3), int)
    np.add.at(counts, ([*map(KINDS.index, labels)], [*map(KINDS.index, verdicts)]), 1)
    f1 = 2 * np.diag(counts) / np.maximum(counts.sum(0) + counts.sum(1), 1)
    return [*f1.tolist(), verifier_bench.mean_f1(counts)]


def interval(values: Sequence[float]) -> str:
    """Show the mean of F1 over seeds with its 95 % interval, which ends at 1; without, if equal."""
    mean = intervals.mean_estimate(values)
    if len(set(values)) == 1:
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} ({mean.low:.3f} to {min(mean.high, 1):.3f})"


def show(lines: list[dict[str, Any]]) -> None:
    """Print F1 over seeds with its interval, of each kind and of each type of answer."""
    columns = ("rows", "", *verifier_bench.KINDS, "mean")
    table = []
    for name in ("all", *TYPES):
        of_type = [name in ("all", TYPE_OF[letter]) for letter in lines[0]["types"]]
        labels = "".join(itertools.compress(lines[0]["labels"], of_type))
        said = ["".join(itertools.compress(line["verdicts"], of_type)) for line in lines]
        by_seed = zip(*(f1_of(labels, verdicts) for verdicts in said), strict=True)
        frequent = max(KINDS, key=labels.count) * len(labels)
        table.append([f"{name}, {len(labels)}", "judge", *map(interval, by_seed)])
        constant = [f"{value:.3f}" for value in f1_of(labels, frequent)]
        table.append(["", "the most frequent label", *constant])
    print(markdown.table(columns, table))


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/three_verdicts"))
    parser.add_argument("--small", action="store_true", help="one step; results stay in --to")
    flags = parser.parse_args()
    measure(flags.to, flags.small)
    if not flags.small:
        show(arms.read_lines(RESULTS))


if __name__ == "__main__":
    main()
