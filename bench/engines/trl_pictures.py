"""TRL's GRPOTrainer on prompts with pictures, for bench/picture_peers.py:

    python trl_pictures.py WORK.json

With the kind "loss", completions and old log-probs are given: FOLDER/theirs.npz gets the token ids
of the prompts, log-probs and loss, and FOLDER/gradient is a model directory with the gradient in
place of the weights. With the kind "step", FOLDER/theirs.json gets the seconds and the sampled
tokens of the steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, Features, Image, List, Value
from transformers import AutoModelForImageTextToText
from trl import GRPOConfig, GRPOTrainer

ROWS = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "images": List(Image()),
    }
)
"""TRL's columns of a data set with images."""


class Clock(transformers.TrainerCallback):
    """Notes the time at the start of each step and after the last."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    on_train_end = on_step_begin


def text_of(completion: list[dict[str, str]]) -> str:
    return completion[-1]["content"]


def count_digits(completions: list[Any], **columns: Any) -> list[float]:
    """The reward of bench/picture_peers.py."""
    return [float(sum(map(str.isdigit, text_of(completion)))) for completion in completions]


def make_trainer(work: dict[str, Any], micro_batch: int, callbacks: list[Any]) -> GRPOTrainer:
    folder = Path(work["rows"]).parent
    rows = [json.loads(line) for line in Path(work["rows"]).read_text().splitlines()]
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
    completions = work["prompts"] * work["group"]
    settings = GRPOConfig(
        output_dir=str(Path(work["folder"]) / "trl"),
        max_steps=work["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=completions // micro_batch,
        num_generations=work["group"],
        max_completion_length=work["new_tokens"],
        # Completions of one length: no token ends them.
        generation_kwargs={"min_new_tokens": work["new_tokens"]},
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        scale_rewards="none",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=count_digits,
        args=settings,
        train_dataset=Dataset.from_list(rows, features=ROWS),
        callbacks=callbacks,
    )


def loss(work: dict[str, Any]) -> None:
    """Compute the loss of given completions by the trainer's own methods, and its gradient."""
    folder = Path(work["folder"])
    with np.load(folder / "completions.npz") as arrays:
        ids = arrays["ids"]
        lengths = arrays["lengths"]
        old = torch.tensor(arrays["old_log_probs"])
    trainer = make_trainer(work, len(ids), [])
    model = trainer.model
    prompts: list[Any] = []

    def completions(prompt_ids: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        prompts.extend(prompt_ids)
        return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)], None

    trainer._generate_single_turn = completions
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    inputs = trainer._generate_and_score_completions(rows)
    inputs["old_per_token_logps"] = old[:, : inputs["completion_ids"].shape[1]]
    compute = trainer._get_per_token_logps_and_entropies
    computed: list[Any] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        computed.append(compute(*arguments, **options))
        return computed[-1]

    trainer._get_per_token_logps_and_entropies = kept
    value = trainer._compute_loss(model, inputs)
    value.backward()
    longest = max(map(len, prompts))
    padded = np.full((len(prompts), longest), -1)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    np.savez(
        folder / "theirs.npz",
        prompts=padded,
        log_probs=computed[0][0].detach().numpy(),
        advantages=inputs["advantages"].numpy(),
        loss=value.detach().numpy(),
    )
    for parameter in model.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    model.save_pretrained(folder / "gradient")


def step(work: dict[str, Any]) -> None:
    """Run the steps of the trainer."""
    clock = Clock()
    trainer = make_trainer(work, work["prompts"] * work["group"] // work["micro_batches"], [clock])
    generate = trainer._generate_single_turn
    tokens: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        result = generate(*arguments, **options)
        tokens.append(sum(map(len, result[0])))
        return result

    trainer._generate_single_turn = counted
    trainer.train()
    seconds = np.diff(clock.times).tolist()
    answer = json.dumps({"seconds": seconds, "tokens": tokens})
    (Path(work["folder"]) / "theirs.json").write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    {"loss": loss, "step": step}[given["kind"]](given)
