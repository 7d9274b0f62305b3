"""tpu_rl as its users run it: the program launch/run.py with a reward file, logging and checkpoints."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import protocol  # noqa: E402
from llama import LLAMA, as_in_runs  # noqa: E402

from launch import compilation_cache, config, results, run  # noqa: E402
from tpu_rl import models, sampler  # noqa: E402
from tpu_rl.algos import GrpoConfig  # noqa: E402
from tpu_rl.optimizers import OptimizerConfig  # noqa: E402
from tpu_rl.sampler import SamplerConfig, decoding  # noqa: E402
from tpu_rl.types import Purpose  # noqa: E402

SHAPE = LLAMA | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": protocol.VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": protocol.EOS,
    "pad_token_id": protocol.PAD,
}


def write_model(work: protocol.Work) -> dict[str, Any]:
    """Random weights and a tokenizer with a word for each token, as a directory that all engines load."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.from_config(SHAPE)
    models.save(work.model, model, jax.jit(model.init)(jax.random.key(0)))
    named = {"<pad>": protocol.PAD, "<end>": protocol.END, "<unk>": protocol.UNKNOWN}
    words = {protocol.word(token): token for token in range(protocol.FIRST_WORD, protocol.VOCABULARY)}
    vocabulary = named | words | {"<eos>": protocol.EOS}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(work.model)
    return {}


def step(work: protocol.Work) -> dict[str, Any]:
    """Steps of the run; the meter looks on where the rollouts begin, and lengths are forced there."""
    folder = Path(work.folder)
    rows = [{"prompt": protocol.text(prompt)} for prompts in work.prompts for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config.save(experiment(work), folder / "config.yaml")
    meter, tokens = protocol.Meter(work.warmup), []
    sampler.sample = watched(sampler.sample, work, meter, tokens)
    if work.lengths:
        decoding.Shares = InTurn  # lengths are as unknown beforehand as a stop token's
    finish = results.finish

    def ended(*arguments: Any) -> None:
        meter.border()
        found.update(meter.result())
        finish(*arguments)

    results.finish, found = ended, {}
    code = run.main([str(folder / "config.yaml")])
    if code:
        sys.exit(code)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    counted = [row for row in metrics if row["step"] > work.warmup]
    stamps = [row["time"] for row in metrics if row["step"] >= work.warmup]
    return found | {
        # From one row of metrics to the next, so that logging and checkpoints are in it.
        "seconds": protocol.between(stamps),
        "rollout_seconds": [row["time/rollout"] for row in counted],
        "update_seconds": [row["time/update"] for row in counted],
        "log_prob_gap": max(row["policy/log_prob_gap_max"] for row in counted),
        "tokens": tokens[work.warmup :],
    }


def experiment(work: protocol.Work) -> config.ExperimentConfig:
    longest = work.prompt_tokens + work.new_tokens
    whole_group = work.prompt_tokens + work.group * work.new_tokens
    prompts = len(work.prompts[0])
    return config.ExperimentConfig(
        algorithm=GrpoConfig(),
        data=config.FileData(path=str(Path(work.folder) / "prompts.jsonl")),
        model=config.ModelConfig(path=work.model),
        reward=(f"{protocol.REWARD}:even_words",),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        batch=config.BatchConfig(
            prompts=prompts,
            completions=work.group,
            row_length=max(longest, ROW) if work.lengths else whole_group,
            micro_batch_rows=MICRO_BATCH,
        ),
        sampling=config.SamplingConfig(
            max_prompt_tokens=work.prompt_tokens,
            max_new_tokens=work.new_tokens,
            max_rows=SLOTS if work.lengths else prompts * work.group,
        ),
        evaluation=config.EvaluationConfig(rows=0),
        steps=work.steps,
        checkpoint_every=3,
        run_dir=str(Path(work.folder) / "run"),
    )


ROW, MICRO_BATCH, SLOTS = 512, 2, 32
"""Where lengths differ: tokens of a packed row, and rows decoded at once; everywhere: packed rows of a micro-batch."""


class InTurn(decoding.Shares):
    """Who decodes what, in the order of the prompts."""

    def __init__(self, asked: Any, *others: Any):
        super().__init__(asked._replace(limits=np.zeros_like(asked.limits)), *others)
        self.asked = asked


def watched(
    sample: Callable[..., Any], work: protocol.Work, meter: protocol.Meter, tokens: list[int]
) -> Callable[..., Any]:
    calls = itertools.count()

    def call(*positional: Any, **how: Any) -> Any:
        meter.loaded()
        meter.border()
        if work.lengths:
            how["limits"] = work.lengths[next(calls)]
        rollout = sample(*positional, **how)
        tokens.append(int(rollout.action_mask.sum()))
        return rollout

    return call


def rollout(work: protocol.Work) -> dict[str, Any]:
    """Completions alone, sampled and greedy; the last that are sampled are kept with their log-probs."""
    compilation_cache.use()
    model, params = models.load(work.model)
    policy, found, counts = models.policy(as_in_runs(model)), {}, {}
    for rows, greedy in itertools.product(work.batches, (False, True)):
        how = SamplerConfig(
            work.new_tokens, temperature=float(not greedy), max_rows=rows, prompt_length=work.prompt_tokens
        )
        seconds = []
        for index, prompts in enumerate(work.prompts):
            began = time.perf_counter()
            key = sampler.run_key(0, Purpose.ROLLOUT, index)
            drawn = sampler.sample(policy, params, [list(prompt) for prompt in prompts[:rows]], key, how)
            seconds.append(time.perf_counter() - began)
        name = f"{'greedy' if greedy else 'sampling'} {rows}"
        found[name], counts[name] = seconds[work.warmup :], int(drawn.action_mask.sum())
        if not greedy:
            arrays = {"tokens": drawn.tokens, "action_mask": drawn.action_mask, "log_probs": drawn.log_probs}
            np.savez(Path(work.folder) / "drawn.npz", **arrays)
    return {"seconds": found, "tokens": counts, "drawn": str(Path(work.folder) / "drawn.npz")}


if __name__ == "__main__":
    protocol.main({"write_model": write_model, "step": step, "rollout": rollout})
