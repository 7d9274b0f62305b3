"""tpu_rl as its users run it: launch/run.py with a reward file, logging and checkpoints."""

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

import jax
import numpy as np
import protocol
from llama import LLAMA, SMOLLM2, as_in_runs
from safetensors.numpy import load_file, save_file

from tpu_rl import models, sampler
from tpu_rl.algos import GrpoConfig
from tpu_rl.commands import config, finish, run
from tpu_rl.runtime import compilation_cache
from tpu_rl.sampler import SamplerConfig, batch_sampler
from tpu_rl.train.optimizers import OptimizerConfig
from tpu_rl.types import Purpose

SIZES = {"llama": LLAMA | {"vocab_size": protocol.VOCABULARY}, "smollm2": SMOLLM2}
"""Sizes of the model, by the variant of the work."""
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": protocol.EOS,
    "pad_token_id": protocol.PAD,
}


def write_model(work: protocol.Work) -> dict[str, Any]:
    """Write random weights and a tokenizer with one word per token, for all engines.

    The variant is a name of SIZES.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.from_config(SIZES[work.variant] | SHAPE)
    models.save(work.model, model, jax.jit(model.init)(jax.random.key(0)))
    forbid_end(Path(work.model) / "model.safetensors")
    control = {"<pad>": protocol.PAD, "<end>": protocol.END, "<unk>": protocol.UNKNOWN}
    words = {protocol.word(token): token for token in range(protocol.FIRST_WORD, protocol.EOS)}
    vocabulary = control | words | {"<eos>": protocol.EOS}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(work.model)
    return {}


def forbid_end(file: Path) -> None:
    """Give the end of sequence, and ids that are no words, logits far below all others.

    Every word's embedding has the same positive number in the first feature, which no layer
    changes, and their rows are negative there. The weights are those of a Llama.
    """
    weights = {name: np.array(value) for name, value in load_file(file).items()}
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 0.1
    head = weights.get("lm_head.weight", embedding)
    head[protocol.EOS :] = 0.0
    head[protocol.EOS :, 0] = -1000.0
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0.0
    save_file(weights, file, metadata={"format": "pt"})


def step(work: protocol.Work) -> dict[str, Any]:
    """Run the steps. Wrapped functions of the library measure them and force lengths."""
    folder = Path(work.folder)
    rows = [{"prompt": protocol.text(prompt)} for prompts in work.prompts for prompt in prompts]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    config.save(experiment(work), folder / "config.yaml")
    meter = protocol.Meter(work.warmup)
    tokens: list[int] = []
    measured: dict[str, Any] = {}
    sampler.sample = metered_sample(sampler.sample, work, meter, tokens)
    if work.lengths:
        batch_sampler.DeviceQueues = UnknownLengths
    original_finish = finish.finish

    def metered_finish(*arguments: Any) -> None:
        meter.step_begins()
        measured.update(meter.result())
        original_finish(*arguments)

    finish.finish = metered_finish
    code = run.main([str(folder / "config.yaml")])
    if code:
        sys.exit(code)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    counted = [row for row in metrics if row["step"] > work.warmup]
    stamps = [row["time"] for row in metrics if row["step"] >= work.warmup]
    return measured | {
        # From one row of metrics to the next: this includes logging and checkpoints.
        "seconds": protocol.between(stamps),
        "rollout_seconds": [row["time/rollout"] for row in counted],
        "update_seconds": [row["time/update"] for row in counted],
        "log_prob_gap": max(row["policy/log_prob_gap_max"] for row in counted),
        "tokens": tokens[work.warmup :],
    }


ROW_LENGTH = 512
"""Tokens of a packed row, where lengths differ."""
SLOTS = 32
"""Rows decoded at once, where lengths differ."""
MICRO_BATCH_ROWS = 2


def experiment(work: protocol.Work) -> config.ExperimentConfig:
    """Return the configuration of the run."""
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
            group_size=work.group,
            row_length=max(longest, ROW_LENGTH) if work.lengths else whole_group,
            micro_batch_rows=MICRO_BATCH_ROWS,
        ),
        sampling=config.SamplingConfig(
            max_prompt_tokens=work.prompt_tokens,
            max_new_tokens=work.new_tokens,
            max_num_seqs=SLOTS if work.lengths else prompts * work.group,
        ),
        evaluation=config.EvaluationConfig(rows=0),
        steps=work.steps,
        checkpoint=config.CheckpointConfig(3),
        run_dir=str(Path(work.folder) / "run"),
    )


class UnknownLengths(batch_sampler.DeviceQueues):
    """Queues of rows in the order of the prompts: the scheduler must not use the forced lengths."""

    def __init__(self, request: Any, *others: Any):
        super().__init__(request._replace(limits=np.zeros_like(request.limits)), *others)
        self.request = request


def metered_sample(
    sample: Callable[..., Any], work: protocol.Work, meter: protocol.Meter, tokens: list[int]
) -> Callable[..., Any]:
    """Return `sampler.sample` with a meter, forced lengths, and a count of its tokens."""
    calls = itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        meter.loaded()
        meter.step_begins()
        if work.lengths:
            options["limits"] = work.lengths[next(calls)]
        rollout = sample(*arguments, **options)
        tokens.append(int(rollout.action_mask.sum()))
        return rollout

    return call


def rollout(work: protocol.Work) -> dict[str, Any]:
    """Measure completions, sampled and greedy.

    The last sampled completions are written to a file, with their log-probs.
    """
    compilation_cache.enable()
    model, params = models.load(work.model)
    policy = models.policy(as_in_runs(model))
    file = Path(work.folder) / "rollout.npz"
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    for rows, greedy in itertools.product(work.batches, (False, True)):
        settings = SamplerConfig(
            work.new_tokens,
            temperature=float(not greedy),
            max_num_seqs=rows,
            prompt_length=work.prompt_tokens,
        )
        times = []
        for index, prompts in enumerate(work.prompts):
            start = time.perf_counter()
            key = sampler.run_key(0, Purpose.ROLLOUT, index)
            token_ids = [list(prompt) for prompt in prompts[:rows]]
            result = sampler.sample(policy, params, token_ids, key, settings)
            times.append(time.perf_counter() - start)
        name = f"{'greedy' if greedy else 'sampling'} {rows}"
        seconds[name] = times[work.warmup :]
        tokens[name] = int(result.action_mask.sum())
        if not greedy:
            np.savez(
                file,
                tokens=result.tokens,
                action_mask=result.action_mask,
                log_probs=result.log_probs,
            )
    return {"seconds": seconds, "tokens": tokens, "rollout": str(file)}


if __name__ == "__main__":
    protocol.main({"write_model": write_model, "step": step, "rollout": rollout})
