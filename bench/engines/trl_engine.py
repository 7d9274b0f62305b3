"""TRL's GRPOTrainer, and transformers for completions alone and for reference log-probs."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import reward
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor
from transformers.generation.continuous_batching import ContinuousBatchingManager
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH_TOKENS = 2304
"""Padded tokens of a micro-batch, prompts included, at most. On CPUs this is faster than 8192, and
needs less memory."""


class Forced(LogitsProcessor):
    """Makes row i sample the token END as its lengths[i]-th token, and never before."""

    def __init__(self, prompt_tokens: int, lengths: tuple[int, ...]):
        self._last = torch.tensor(lengths) - 1 + prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.shape[1] >= self._last
        scores[:, protocol.END] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, protocol.END] = 0.0
        return scores


class MeterCallback(transformers.TrainerCallback):
    """Calls the meter at the start of each step."""

    def __init__(self, meter: protocol.Meter):
        self._meter = meter

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._meter.loaded()
        self._meter.step_begins()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._meter.step_begins()


def step(work: protocol.Work) -> dict[str, Any]:
    """Run the steps of the trainer.

    Variants are "continuous", for continuous batching, and "checkpointing", of activations.
    """
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    if work.lengths:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(protocol.END)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    rows = len(work.prompts[0]) * work.group
    longest = work.prompt_tokens + work.new_tokens
    size = next(
        size
        for size in range(rows, 0, -1)
        if rows % size == 0 and size * longest <= MICRO_BATCH_TOKENS
    )
    settings = GRPOConfig(
        output_dir=work.folder,
        max_steps=work.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=rows // size,
        num_generations=work.group,
        max_completion_length=work.new_tokens,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=work.variant == "checkpointing",
        use_transformers_continuous_batching=work.variant == "continuous",
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    prompts = [{"prompt": protocol.text(prompt)} for prompts in work.prompts for prompt in prompts]
    meter = protocol.Meter(work.warmup)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward.even_words,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[MeterCallback(meter)],
    )
    generated, scored, tokens = time_trainer(trainer, work)
    trainer.train()
    measured = meter.result()
    counted = slice(work.warmup, None)
    updates = [
        total - before for total, before in zip(measured["seconds"], scored[counted], strict=True)
    ]
    return measured | {
        "rollout_seconds": generated[counted],
        "update_seconds": updates,
        "tokens": tokens[counted],
    }


def time_trainer(
    trainer: GRPOTrainer, work: protocol.Work
) -> tuple[list[float], list[float], list[int]]:
    """Wrap the trainer's methods with timers.

    Returns lists that grow by one entry per step: (seconds to generate, seconds until completions
    are scored, tokens).
    """
    generate = trainer._generate_single_turn
    score = trainer._generate_and_score_completions
    generated: list[float] = []
    scored: list[float] = []
    tokens: list[int] = []

    def timed_generate(prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        if work.lengths:
            force_lengths(trainer.model, work, len(generated))
        start = time.perf_counter()
        result = generate(prompt_ids, *arguments, **options)
        generated.append(time.perf_counter() - start)
        tokens.append(sum(map(len, result[0])))
        return result

    def timed_score(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = score(*arguments)
        scored.append(time.perf_counter() - start)
        return result

    trainer._generate_single_turn = timed_generate
    trainer._generate_and_score_completions = timed_score
    return generated, scored, tokens


ADD_REQUEST = ContinuousBatchingManager.add_request


def force_lengths(model: Any, work: protocol.Work, index: int) -> None:
    """Force the lengths of step `index` on the next completions.

    Requests of a continuous batch get their lengths one by one; its scheduler does not use them.
    """
    lengths = work.lengths[index]
    processors = transformers.LogitsProcessorList([Forced(work.prompt_tokens, lengths)])
    generate = type(model).generate
    model.generate = lambda **options: generate(model, logits_processor=processors, **options)

    def add_request(manager: Any, *, request_id: str, **options: Any) -> Any:
        length = lengths[int(request_id.removeprefix("req_"))]
        options |= {"max_new_tokens": length, "eos_token_id": -1}
        return ADD_REQUEST(manager, request_id=request_id, **options)

    ContinuousBatchingManager.add_request = add_request


def rollout(work: protocol.Work) -> dict[str, Any]:
    """Measure `generate` of transformers, sampled and greedy."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    seconds: dict[str, list[float]] = {}
    token_counts: dict[str, int] = {}
    for rows, greedy in itertools.product(work.batches, (False, True)):
        options = (
            {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
        )
        settings = GenerationConfig(
            max_new_tokens=work.new_tokens, pad_token_id=protocol.PAD, **options
        )
        times = []
        for prompts in work.prompts:
            tokens = torch.tensor(prompts[:rows])
            mask = torch.ones_like(tokens)
            start = time.perf_counter()
            with torch.inference_mode():
                result = model.generate(
                    input_ids=tokens, attention_mask=mask, generation_config=settings
                )
            times.append(time.perf_counter() - start)
        name = f"{'greedy' if greedy else 'sampling'} {rows}"
        seconds[name] = times[work.warmup :]
        token_counts[name] = int(result[:, work.prompt_tokens :].numel())
    return {"seconds": seconds, "tokens": token_counts}


def score(work: protocol.Work) -> dict[str, Any]:
    """Return the largest difference between given log-probs of tokens and those of transformers."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    with np.load(Path(work.rollout)) as arrays:
        tokens = torch.tensor(arrays["tokens"]).long()
        mask = torch.tensor(arrays["action_mask"])
        given = torch.tensor(arrays["log_probs"])
    with torch.inference_mode():
        log_probs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    computed = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    gaps = (computed - given[:, 1:]).abs()[mask[:, 1:]]
    return {"gap": gaps.max().item(), "tokens": int(mask.sum())}


if __name__ == "__main__":
    protocol.main({"step": step, "rollout": rollout, "score": score})
