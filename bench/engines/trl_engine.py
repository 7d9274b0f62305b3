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
"""Of prompts and completions, padded: what a micro-batch is filled to. Faster on CPUs than 8192, and smaller."""


class Forced(LogitsProcessor):
    """Row i draws the token END as its last of lengths[i], and never before."""

    def __init__(self, prompt_tokens: int, lengths: tuple[int, ...]):
        self._last = torch.tensor(lengths) - 1 + prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.shape[1] >= self._last
        scores[:, protocol.END] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, protocol.END] = 0.0
        return scores


class Watch(transformers.TrainerCallback):
    def __init__(self, meter: protocol.Meter):
        self._meter = meter

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._meter.loaded()
        self._meter.border()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._meter.border()


def step(work: protocol.Work) -> dict[str, Any]:
    """Steps of the trainer. Variants: "continuous", with continuous batching; "checkpointing", of activations."""
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    if work.lengths:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(protocol.END)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    rows = len(work.prompts[0]) * work.group
    longest = work.prompt_tokens + work.new_tokens
    size = next(size for size in range(rows, 0, -1) if rows % size == 0 and size * longest <= MICRO_BATCH_TOKENS)
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
        callbacks=[Watch(meter)],
    )
    drawn, scored, tokens = watch(trainer, work)
    trainer.train()
    found = meter.result()
    counted = slice(work.warmup, None)
    updates = [whole - before for whole, before in zip(found["seconds"], scored[counted], strict=True)]
    return found | {"rollout_seconds": drawn[counted], "update_seconds": updates, "tokens": tokens[counted]}


def watch(trainer: GRPOTrainer, work: protocol.Work) -> tuple[list[float], list[float], list[int]]:
    """(seconds that completions took, seconds until they were scored, their tokens), of each step to come."""
    generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions
    drawn, scored, tokens = [], [], []

    def timed_generate(prompt_ids: Any, *others: Any, **named: Any) -> Any:
        if work.lengths:
            force(trainer.model, work, len(drawn))
        began = time.perf_counter()
        result = generate(prompt_ids, *others, **named)
        drawn.append(time.perf_counter() - began)
        tokens.append(sum(map(len, result[0])))
        return result

    def timed_score(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = score(*arguments)
        scored.append(time.perf_counter() - began)
        return result

    trainer._generate_single_turn, trainer._generate_and_score_completions = timed_generate, timed_score
    return drawn, scored, tokens


def force(model: Any, work: protocol.Work, index: int) -> None:
    """The lengths of step `index` for the next completions. Requests of a continuous batch are told theirs one by one;
    its scheduler does not look at them."""
    lengths = work.lengths[index]
    processors = transformers.LogitsProcessorList([Forced(work.prompt_tokens, lengths)])
    whole = type(model).generate
    model.generate = lambda **named: whole(model, logits_processor=processors, **named)
    add = ADD_REQUEST

    def with_length(manager: Any, *, request_id: str, **named: Any) -> Any:
        named |= {"max_new_tokens": lengths[int(request_id.removeprefix("req_"))], "eos_token_id": -1}
        return add(manager, request_id=request_id, **named)

    ContinuousBatchingManager.add_request = with_length


ADD_REQUEST = ContinuousBatchingManager.add_request


def rollout(work: protocol.Work) -> dict[str, Any]:
    """transformers' generate, sampled and greedy."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    found, counts = {}, {}
    for rows, greedy in itertools.product(work.batches, (False, True)):
        ways = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
        how = GenerationConfig(max_new_tokens=work.new_tokens, pad_token_id=protocol.PAD, **ways)
        seconds = []
        for prompts in work.prompts:
            tokens = torch.tensor(prompts[:rows])
            began = time.perf_counter()
            with torch.inference_mode():
                drawn = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
            seconds.append(time.perf_counter() - began)
        name = f"{'greedy' if greedy else 'sampling'} {rows}"
        found[name] = seconds[work.warmup :]
        counts[name] = int(drawn[:, work.prompt_tokens :].numel())
    return {"seconds": found, "tokens": counts}


def score(work: protocol.Work) -> dict[str, Any]:
    """The largest difference between given log-probs of drawn tokens and transformers' of the same."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    with np.load(Path(work.drawn)) as drawn:
        tokens, mask, given = (torch.tensor(drawn[name]) for name in ("tokens", "action_mask", "log_probs"))
    tokens = tokens.long()
    with torch.inference_mode():
        log_probs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    own = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    gaps = (own - given[:, 1:]).abs()[mask[:, 1:]]
    return {"gap": gaps.max().item(), "tokens": int(mask.sum())}


if __name__ == "__main__":
    protocol.main({"step": step, "rollout": rollout, "score": score})
