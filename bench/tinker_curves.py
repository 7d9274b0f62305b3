"""GRPO by a client's loop over Tinker, beside launch/run.py: is what they learn the same?

    pip install -e ".[serve,tinker]"
    python bench/tinker_curves.py --to runs/tinker_curves [--seeds 0 1 2] [--steps 60]

Both train an adapter of rank 16 on the shipped model: the same problems in each step, group sizes,
loss (PPO's, one update a batch, every token alike), advantages, optimizer and held-out problems.
Their completions are sampled with other keys, so only means can agree.

Prints the share of held-out problems that are answered rightly, with 95 % intervals, before and
after, and the mean over seeds of the difference, with an interval from the seeds' spread.
"""

from __future__ import annotations

import sys
from pathlib import Path

import arms
import numpy as np
import scipy.stats
import tinker
import tinker_overhead

from tpu_rl import tokenizers
from tpu_rl.commands import config, roles
from tpu_rl.evaluation.intervals import wilson
from tpu_rl.tasks.arithmetic import ArithmeticSource, correct

MODEL = "builtin:arithmetic"
PROMPTS, GROUP_SIZE, MAX_TOKENS, RANK = 32, 8, 64, 16
RATE = 1e-3
HELD_OUT = 500


def client_share(
    service: tinker.ServiceClient, seed: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each held-out problem is answered rightly, before and after."""
    tokenizer = tokenizers.load(roles.model_path(MODEL))
    data = config.parse(["arithmetic_grpo"]).data
    train = ArithmeticSource(data.train, "train", seed)
    held_out = [ArithmeticSource(data.evaluation, "eval")[i] for i in range(HELD_OUT)]
    client = service.create_lora_training_client(MODEL, rank=RANK, seed=seed).result()
    params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    adam = tinker.AdamParams(learning_rate=RATE, beta2=0.999, eps=1e-12)

    def sampled(rows: list[dict[str, str]], count: int) -> list:
        """Return (prompt, sequences, scores [count]) of each row."""
        sampler = client.save_weights_and_get_sampling_client().result()
        prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(ids), count, params) for ids in prompts
        ]
        found = []
        for row, ids, future in zip(rows, prompts, futures, strict=True):
            sequences = future.result().sequences
            texts = [tokenizer.decode(list(sequence.tokens)) for sequence in sequences]
            scores = correct([row["prompt"]] * count, texts, answer=[row["answer"]] * count)
            found.append((ids, sequences, np.array(scores)))
        return found

    before = np.concatenate([scores for _, _, scores in sampled(held_out, 1)])
    for step in range(steps):
        rows = [train[i] for i in range(PROMPTS * step, PROMPTS * (step + 1))]
        batch = [
            tinker_overhead.datum(ids, sequence, advantage)
            for ids, sequences, scores in sampled(rows, GROUP_SIZE)
            for sequence, advantage in zip(
                sequences, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True
            )
        ]
        passed = client.forward_backward(batch, "ppo")
        client.optim_step(adam).result()
        passed.result()
    after = np.concatenate([scores for _, _, scores in sampled(held_out, 1)])
    return before, after


def run_share(folder: Path, seed: int, steps: int) -> list[float]:
    """Return the share of held-out problems that launch/run.py answers, before and after."""
    flags = [
        *("arithmetic_grpo", "--model.lora.rank", str(RANK), "--seed", str(seed)),
        *("--batch.prompts", str(PROMPTS), "--batch.group-size", str(GROUP_SIZE)),
        *("--sampling.max-new-tokens", str(MAX_TOKENS), "--optimizer.learning-rate", str(RATE)),
        *("--optimizer.warmup-steps", "0", "--optimizer.epsilon", "1e-12"),
        *("--optimizer.max-grad-norm", "inf", "--evaluation.rows", str(HELD_OUT)),
        *("--evaluation.interval", str(steps), "--evaluation.no-greedy", "--steps", str(steps)),
    ]
    summary = arms.run(folder, flags)
    return [summary["eval"][when]["accuracy"] for when in ("before", "after")]


def main(arguments: list[str]) -> int:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args(arguments)
    arms.print_heading("seed", "loop", "before, %", "after, %")
    differences = []
    for seed in args.seeds:
        folder = args.to / str(seed)
        with tinker_overhead.serving(MODEL, folder / "client") as service:
            of_client = client_share(service, seed, args.steps)
        of_run = run_share(folder / "run", seed, args.steps)
        shares = {"client": [part.mean() for part in of_client], "run.py": of_run}
        for name, (before, after) in shares.items():
            cells = (
                "{:.1f} ({:.1f} to {:.1f})".format(
                    *(100 * x for x in (share, *wilson(share * HELD_OUT, HELD_OUT)))
                )
                for share in (before, after)
            )
            arms.print_row(seed, name, *cells)
        differences.append(100 * (shares["client"][1] - shares["run.py"][1]))
    mean = float(np.mean(differences))
    listed = ", ".join(f"{difference:+.1f}" for difference in differences)
    print(f"\nclient minus run.py, points: {listed}; mean {mean:+.1f}")
    if len(differences) > 1:
        error = scipy.stats.sem(differences)
        low, high = scipy.stats.t.interval(0.95, len(differences) - 1, mean, error)
        print(f"95 % interval of the mean, by Student's t over seeds: {low:+.1f} to {high:+.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
