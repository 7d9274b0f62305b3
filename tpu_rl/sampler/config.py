"""The settings of the sampler: lengths, distribution of tokens, slots, segments, speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tpu_rl.errors import InputError

TensorParallel = int | Literal["train-mesh"]
"""The number of devices that share heads and widths during sampling, or the mesh of training."""


TEMPERATURES = (1e-4, 1e4)
"""The smallest temperature but 0, and the largest one, for which logits stay finite numbers."""


def is_temperature(temperature: float) -> bool:
    """Return True for 0, which takes the most likely token, and inside of `TEMPERATURES`."""
    return temperature == 0 or TEMPERATURES[0] <= temperature <= TEMPERATURES[1]


@dataclass(frozen=True)
class SegmentConfig:
    """Length of decode segments, and how the sampler adapts to the rows that remain.

    Completions do not depend on these settings, except through the rounding of programs for
    different shapes.
    """

    steps: int = 128
    """Decode steps in a segment. After each segment, the host reports finished rows and looks for
    stop strings."""
    min_slots_per_device: int = 8
    """When no row waits for a slot, the number of slots shrinks to powers of two with the number of
    rows that remain, but not below this number on a device."""
    initial_cache_tokens: int = 512
    """New tokens per row that the first cache has room for. The room doubles when rows outgrow
    it."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: sample several tokens of a row in one step (arXiv 2211.17192).

    A cheap draft proposes the next tokens of a row, and the policy scores all of them at once. Each
    token is then sampled with its own uniform number, as without a draft, and tokens are kept up to
    the first that differs from the draft. Completions are therefore those of plain decoding, except
    through the rounding of programs for different shapes. Only the speed depends on the draft.
    """

    tokens: int = 0
    """Tokens of a draft; 0 turns speculation off."""
    model: str | None = None
    """A small draft model with the same tokenizer: a directory or hub id. By default, drafts are
    looked up: they are the tokens that followed an earlier occurrence of the row's last tokens, in
    its own text or in other completions of its prompt on the same device."""
    ngram: int = 5
    """Look-up: the largest number of last tokens to match. The longest match is used."""
    most_rows: int = 8
    """Draft only while at most this many rows are decoded, over all devices; more rows use a device
    well without drafts. If no more rows than this are ever decoded at once, look-up also decodes
    the completions of a prompt one after another, so that later ones can copy from earlier ones."""

    def __post_init__(self):
        minimums = {"tokens": 0, "ngram": 1, "most_rows": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value < minimum:
                raise InputError(
                    f"Speculation.{name} is {value}",
                    why=f"it must be at least {minimum}",
                    fix=f"set {name}",
                )
        if self.model is not None and not self.tokens:
            raise InputError(
                f"Speculation.model is {self.model!r}",
                why="drafts have no tokens",
                fix="set tokens, e.g. to 4, or name no model",
            )

    def drafts(self, rows: int) -> bool:
        """Return True if drafts are made when `rows` rows are decoded at once."""
        return self.tokens > 0 and rows <= self.most_rows


@dataclass(frozen=True)
class Thinking:
    """The length of thoughts, and the sampling of the answers behind them. Without a limit and
    settings of answers, it is off."""

    max_tokens: int = 0
    """The largest number of tokens of a thought. A longer one is closed by `close`; such forced
    tokens are not learned. 0: no limit but that of the completion."""
    min_tokens: int = 0
    """A thought that ends sooner goes on: what ended it is dropped, and `wait` stands there."""
    close: str = "</think>"
    """The text that ends a thought."""
    wait: str = "\nWait,"
    """The text that a thought goes on with."""
    waits: int = 4
    """The most times that a thought is made to go on."""
    answer_top_k: int | None = None
    """Sample answers from so many of the likeliest tokens; 1: always the likeliest."""

    def __post_init__(self):
        minimums = {"max_tokens": 0, "min_tokens": 0, "waits": 0, "answer_top_k": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(f"Thinking.{name} is {value}", fix=f"use at least {minimum}")
        if not self.close or (self.min_tokens and not self.wait):
            raise InputError(
                "thoughts need texts that end them and that they go on with",
                where="Thinking.close, Thinking.wait",
                fix="leave out the flag, or give a text",
            )
        if 0 < self.max_tokens <= self.min_tokens:
            raise InputError(
                f"thoughts of at least {self.min_tokens} and at most {self.max_tokens} tokens",
                where="Thinking.min_tokens, Thinking.max_tokens",
                fix="use a larger limit",
            )

    @property
    def is_on(self) -> bool:
        """True if it changes anything."""
        return bool(self.max_tokens or self.min_tokens or self.answer_top_k)


@dataclass(frozen=True)
class SamplerConfig:
    """Settings of `sampler.sample`.

    The repetition penalty and the bias change the logits first. The temperature then divides them.
    Truncation goes by the resulting probabilities: top-k, then top-p, then min-p.
    """

    max_new_tokens: int
    """Length limit of a completion in tokens, the stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens, and those that are as likely as the last of them."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens that has at least this probability, which is
    never empty."""
    min_p: float | None = None
    """Keep tokens whose probability is at least this fraction of the largest probability."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that are in the prompt or the completion already, and
    multiply negative ones (CTRL, arXiv 1909.05858, section 4.1)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number to add to its logit; -inf forbids the token."""
    stop_ids: tuple[int, ...] = ()
    """A completion ends with the first of these tokens, which belongs to it."""
    samples_per_prompt: int = 1
    """Completions of each prompt: the group size."""
    pad_id: int = 0
    """Token id of padding."""
    max_num_seqs: int = 256
    """Rows decoded at once, over all devices: the number of slots. When a row ends, the next row
    that waits takes its slot."""
    prompt_length: int | None = None
    """Columns reserved for prompts. The default is the length of the longest prompt, rounded up to
    a power of two. With a fixed number, programs are compiled only once."""
    segments: SegmentConfig = SegmentConfig()
    speculation: Speculation = Speculation()
    record_routing: bool = False
    """Return the experts of each token in `Rollout.routing`. Only for mixtures that record them
    (`models.with_recorded_routing`), and not with drafts or resumed completions."""

    def __post_init__(self):
        def check(is_valid: bool, name: str, requirement: str) -> None:
            if not is_valid:
                raise InputError(
                    f"SamplerConfig.{name} is {getattr(self, name)!r}",
                    why=f"it must be {requirement}",
                    fix=f"set {name}",
                )

        for name in ("max_new_tokens", "samples_per_prompt", "max_num_seqs"):
            check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("top_k", "prompt_length"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1, or None")
        check(
            is_temperature(self.temperature),
            "temperature",
            f"0, or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}",
        )
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1, or None")
        check(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "between 0 and 1, or None")
        check(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "a finite number above 0; 1 turns it off",
        )
        check(
            all(token >= 0 and bias < math.inf for token, bias in self.logit_bias),
            "logit_bias",
            "pairs of a token id and a number below infinity",
        )
        check(all(token >= 0 for token in self.stop_ids), "stop_ids", "a tuple of token ids")
        check(min(vars(self.segments).values()) >= 1, "segments", "numbers of at least 1")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0
