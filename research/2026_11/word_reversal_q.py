"""Q# on word reversal with SmolLM2-135M-Instruct: a q of its first layers guides the frozen model.

    python recipes/smollm2.py --to models/smollm2
    python research/2026_11/word_reversal_q.py --to runs/word_reversal_q [--model models/smollm2]
        [--prompts 240] [--layers 10]

q learns once from answers that the model wrote to the training prompts, 8 of each. Both then answer
the 50 held-out prompts. The model's table is printed as `launch/evaluate.py --guide` prints it,
then the time per token of guided and plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import arms
import q_sharp

from tpu_rl.algos import QSharpConfig
from tpu_rl.commands import config, evaluate
from tpu_rl.commands.config import CheckpointConfig, BatchConfig, ExperimentConfig, FileData, SamplingConfig
from tpu_rl.train.optimizers import OptimizerConfig

RECIPE = arms.ROOT / "recipes" / "word_reversal"
GROUP_SIZE = 8
BATCH_PROMPTS = 8
COEFFICIENTS = (0.3, 0.1)


def make_config(folder: Path, model: Path, num_prompts: int, layers: int) -> ExperimentConfig:
    """Return the run: one round of whole answers of the model, learned once."""
    preset = config.preset("q_sharp")
    steps = num_prompts // BATCH_PROMPTS
    return replace(
        preset,
        algorithm=QSharpConfig(
            distribution="histogram",
            labels="two_hot",
            roll_in="none",
            layers=layers,
            candidates=8,
            prompts=num_prompts,
        ),
        phases=(),
        data=FileData(
            path=str(RECIPE / "train.jsonl"), evaluation_path=str(RECIPE / "held_out.jsonl")
        ),
        reward=(f"{RECIPE / 'reward.py'}:reward",),
        model=replace(preset.model, path=str(model), random_init=False, remat="none"),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=3, schedule="cosine"),
        batch=BatchConfig(
            prompts=BATCH_PROMPTS, group_size=GROUP_SIZE, row_length=256, micro_batch_rows=2
        ),
        sampling=SamplingConfig(max_prompt_tokens=64, max_new_tokens=24, max_num_seqs=64),
        evaluation=replace(preset.evaluation, rows=0),
        steps=steps,
        checkpoint=CheckpointConfig(steps),
        run_dir=str(folder / "q"),
    )


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the run")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--prompts", type=int, default=240, help="prompts that q learns from")
    parser.add_argument("--layers", type=int, default=10, help="layers of q")
    flags = parser.parse_args()
    run_config = make_config(flags.to, flags.model.absolute(), flags.prompts, flags.layers)
    summary: Any = q_sharp.train(run_config)
    print(f"q: {summary['seconds']:.0f} s", flush=True)
    guide = ["--guide", run_config.run_dir, "--baseline", "cd", "--samples", "4"]
    coefficients = ["--kl-coef", *map(str, COEFFICIENTS)]
    rows = ["--data.path", str(RECIPE / "held_out.jsonl"), "--reward", *run_config.reward]
    lengths = ["--max-new-tokens", str(run_config.sampling.max_new_tokens)]
    code = evaluate.main([str(flags.model), *guide, *coefficients, *rows, *lengths])
    if code:
        raise SystemExit(code)
    q_sharp.trained_speed(run_config.run_dir, [8], repeats=2, num_prompts=4, masses=(1.0,))


if __name__ == "__main__":
    main()
