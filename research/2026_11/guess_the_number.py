"""A game of textarena: GRPO learns to use the hints of GuessTheNumber.

    pip install -e ".[environments]"
    python research/2026_11/guess_the_number.py --to runs/guess_the_number [--seeds 0 1 2]

The number is from 1 to 20, and there are 5 turns, which is enough if each guess halves what is
left. Only a right guess earns (guess_game.py). A small model first learns from scratch to imitate a
player who looks at the hints in three guesses of ten, and then plays. Prints one line per run:
games won of 100, before and after, and the mean number of turns in the first and in the last five
steps.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import arms
import tokenizers as fast
from transformers import PreTrainedTokenizerFast

from tpu_rl.environments import contract, named

GAME = f"{Path(__file__).resolve().with_name('guess_game.py')}:OnlyWins"
NUMBERS = range(1, 21)
TURNS = 5
LOOKS = 0.3
"""The share of guesses that agree with all hints on purpose."""
BEGIN = "Game:\n"
PIECES = r" ?[A-Za-z]+|[0-9]+|[\s\S]"
"""What a token is."""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SAMPLING = [
    *("--sampling.max-prompt-tokens", "192", "--sampling.max-new-tokens", "64"),
    *("--sampling.max-turns", str(TURNS), "--sampling.stop-strings", "\n"),
    *("--model.remat", "none"),
]
SFT = [
    "sft",
    *SAMPLING,
    *("--model.random-init", "--steps", "250", "--evaluation.interval", "250"),
    *("--batch.prompts", "32", "--batch.row-length", "512"),
    *("--optimizer.learning-rate", "2e-3", "--optimizer.warmup-steps", "20"),
]
GRPO = [
    "grpo",
    *SAMPLING,
    *("--environment", GAME),
    *("--steps", "40", "--evaluation.interval", "20", "--evaluation.rows", "100"),
    *("--batch.prompts", "32", "--batch.row-length", "512", "--batch.micro-batch-rows", "8"),
    *("--optimizer.learning-rate", "2e-4", "--optimizer.warmup-steps", "5"),
]
STEPS = 5


def play(game: Any, seed: int) -> dict[str, str]:
    """Return a demonstration: what the game says first, and the transcript after it."""
    choose = random.Random(seed)
    prompt = BEGIN + (contract.reset(game, {}, seed) or "")
    left = list(NUMBERS)
    transcript = ""
    for turn in range(TURNS):
        guess = choose.choice(left if choose.random() < LOOKS else NUMBERS)
        observation, _, done = contract.step(game, f"[{guess}]")
        transcript += f"[{guess}]\n"
        if done or turn == TURNS - 1:
            break
        transcript += observation
        is_higher = "higher" in observation
        left = [number for number in left if (number > guess if is_higher else number < guess)]
        left = left or list(NUMBERS)
    return {"prompt": prompt, "completion": transcript}


def write_inputs(folder: Path) -> None:
    """Write a model's configuration, its tokenizer, demonstrations, and rows to play with."""
    (factory,) = named.load(GAME).values()
    game = factory()
    demonstrations = [play(game, seed) for seed in range(4000)]
    texts = [row["prompt"] + row["completion"] for row in demonstrations]
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    special["unk_token"] = "<unk>"
    numbers = map(str, NUMBERS)
    pieces = sorted({*numbers, *(piece for text in texts for piece in re.findall(PIECES, text))})
    vocabulary = {token: index for index, token in enumerate([*special.values(), *pieces])}
    model = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(PIECES), "isolated")
    model.decoder = fast.decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder / "model")
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = json.dumps({**MODEL, **ids, "vocab_size": len(vocabulary)})
    (folder / "model/config.json").write_text(settings, encoding="utf-8")
    write_rows(folder / "demonstrations.jsonl", demonstrations)
    # The seed of an episode chooses the number, so that rows say nothing.
    write_rows(folder / "games.jsonl", [{"prompt": BEGIN, "row": row} for row in range(1000)])


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def turns_cells(run_dir: Path) -> list[str]:
    """Return the mean number of turns in the first and in the last steps."""
    turns = [row["env/turns"] for row in arms.read_metrics(run_dir) if "env/turns" in row]
    return [f"{sum(part) / len(part):.2f}" for part in (turns[:STEPS], turns[-STEPS:])]


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags = parser.parse_args()
    inputs = flags.to / "inputs"
    if not (inputs / "games.jsonl").exists():
        write_inputs(inputs)
    data = ["--model.path", str(inputs / "model"), "--data.path"]
    arms.run(flags.to / "sft", [*SFT, *data, str(inputs / "demonstrations.jsonl")])
    start = ["--model.path", str(flags.to / "sft/model")]
    grpo = [*GRPO, *start, "--data.path", str(inputs / "games.jsonl")]
    arms.table(
        flags.to, {"grpo": grpo}, flags.seeds, ("turns at first", "turns at last"), turns_cells
    )


if __name__ == "__main__":
    main()
