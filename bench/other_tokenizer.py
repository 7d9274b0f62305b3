"""Distillation from a teacher with another tokenizer, beside one with the student's own.

    python bench/other_tokenizer.py --to runs/other_tokenizer [--small]

The task is that of the default run. Its model reads characters. Two teachers of the same sizes
learn from random weights to write solutions out: one reads characters too, the other reads pairs of
digits as one token. Each then teaches the shipped model by the reward

    implicit(model=TEACHER,reference=builtin:arithmetic,beta=1), --algorithm.kl-reward-coef 1

of REINFORCE, which is KL(policy || teacher), and the one with the same tokens also by `distill`,
which reads whole distributions. A control has a teacher of random weights (one step of SFT). Three
seeds; the table has accuracy on 500 held-out problems.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import arms

STEPS = 40
SEEDS = (0, 1, 2)
START = arms.ROOT / "tpu_rl/pretrained/arithmetic"
TEACHER = (
    "arithmetic_sft --data.written-share 1 1 1 1 --evaluation.rows 300 --evaluation.interval 1000"
)
STUDENT = (
    "--batch.prompts 16 --batch.group-size 8 --optimizer.learning-rate 3e-4 "
    "--optimizer.warmup-steps 2 --evaluation.interval 100"
)
REWARD = (
    "arithmetic_grpo --algorithm reinforce --algorithm.baseline group --algorithm.no-whiten "
    "--algorithm.kl-reward-coef 1 --evaluation.reward arithmetic"
)


def write_start(folder: Path, has_pairs: bool) -> None:
    """Write the folder of a model without weights, perhaps with tokens for pairs of digits."""
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    from tpu_rl.tasks.arithmetic import ALPHABET

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pairs = [f"{a}{b}" for a in range(10) for b in range(10)] if has_pairs else []
    names = {name: f"<{name.partition('_')[0]}>" for name in ("pad_token", "bos_token")}
    names |= {"eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*names.values(), *pairs, *ALPHABET])}
    backend = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = r"\d\d|[\s\S]" if has_pairs else r"[\s\S]"
    backend.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(pattern), "isolated")
    backend.decoder = fast.decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    config = json.loads((START / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = len(vocabulary)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/other_tokenizer"))
    parser.add_argument("--teacher-steps", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="one step of each, one seed")
    flags = parser.parse_args()
    steps = ["--steps", "1" if flags.small else str(STEPS)]
    rows = ["--evaluation.rows", "20" if flags.small else "500"]
    models = {}
    for name, has_pairs in (("characters", False), ("pairs", True)):
        if not (flags.to / f"teacher_{name}" / "summary.json").exists():
            write_start(flags.to / f"start_{name}", has_pairs)
        count = "1" if flags.small else str(flags.teacher_steps)
        begin = ["--model.path", str(flags.to / f"start_{name}"), "--steps", count]
        summary = arms.run(flags.to / f"teacher_{name}", [*TEACHER.split(), *begin])
        models[name] = str(flags.to / f"teacher_{name}/model")
        print(f"teacher, {name}: {arms.percent(summary['eval']['after'])}", flush=True)
    begin = ["--model.path", str(flags.to / "start_pairs"), "--steps", "1"]
    arms.run(flags.to / "teacher_random", [*TEACHER.split(), *begin])
    models["random"] = str(flags.to / "teacher_random/model")

    def taught(teacher: str) -> list[str]:
        reward = f"implicit(model={teacher},reference={START},beta=1)"
        return [*REWARD.split(), *STUDENT.split(), *steps, *rows, "--reward", reward]

    students = {
        "pairs of digits": taught(models["pairs"]),
        "characters": taught(models["characters"]),
        "characters, distill": [
            *f"arithmetic_gkd --algorithm.teacher {models['characters']}".split(),
            *("--algorithm.on-policy", "1"),
            *(*STUDENT.split(), *steps, *rows),
        ],
        "random, pairs of digits": taught(models["random"]),
    }
    arms.table(flags.to, students, SEEDS[: 1 if flags.small else None])


if __name__ == "__main__":
    main()
