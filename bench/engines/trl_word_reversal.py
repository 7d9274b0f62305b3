"""TRL's GRPOTrainer on word reversal, for bench/word_reversal.py:

    python trl_word_reversal.py WORK.json RESULTS.jsonl

Results are lines {"step", "seconds", "reward"} of each step, and {"step", "held_out": [rewards]}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """The reward of recipes/word_reversal/reward.py."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [SequenceMatcher(None, text, right).ratio() for text, right in pairs]


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class Recorder(transformers.TrainerCallback):
    """Writes the seconds of steps, and the rewards of held-out prompts before the first step and
    every few steps."""

    def __init__(self, work: dict[str, Any], tokenizer: Any, results: Path):
        self._work = work
        self._tokenizer = tokenizer
        self._results = results.open("w", encoding="utf-8")
        self._held_out = read_rows(work["held_out"])[: work["evaluation_rows"]]
        self._began = 0.0
        self.seconds = 0.0

    def write(self, **values: Any) -> None:
        print(json.dumps(values), file=self._results, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluate(0, others["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seconds = time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
        if "reward" not in logs:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        step = state.global_step
        self.write(step=step, seconds=self.seconds, reward=logs["reward"], peak_memory=peak)
        if step % self._work["interval"] == 0:
            self.evaluate(step, others["model"])

    def evaluate(self, step: int, model: Any) -> None:
        """Sample an answer to each held-out prompt at temperature 1, and write the rewards."""
        if not self._held_out:
            return
        texts = [
            self._tokenizer.apply_chat_template(
                row["prompt"], tokenize=False, add_generation_prompt=True
            )
            for row in self._held_out
        ]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            output = model.generate(
                **inputs, do_sample=True, top_k=0, max_new_tokens=self._work["new_tokens"]
            )
        model.train(was_training)
        completions = self._tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        messages = [[{"role": "assistant", "content": text}] for text in completions]
        values = reward(None, messages, [row["answer"] for row in self._held_out])
        self.write(step=step, held_out=values)


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    completions = work["prompts"] * work["group_size"]
    size = work["micro_batch"]
    settings = GRPOConfig(
        output_dir=work["folder"],
        seed=work["seed"],
        data_seed=work["seed"],
        max_steps=work["steps"],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=completions // size,
        num_generations=work["group_size"],
        max_completion_length=work["new_tokens"],
        learning_rate=work["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(read_rows(work["train"])),
        processing_class=tokenizer,
        callbacks=[Recorder(work, tokenizer, Path(sys.argv[2]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
