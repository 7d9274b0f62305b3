"""The settings of the sampler: lengths, distribution of tokens, slots, segments, speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.ranges import Count, CountOrNone, In, Needs, Positive, Share

TensorParallel = int | Literal["train-mesh"]
"""The number of devices that share heads and widths during sampling, or the mesh of training."""


TEMPERATURES = In("[1e-4, 1e4]", "use 1.0; 0 takes the most likely token", zero=True)
"""The temperatures for which logits stay finite numbers."""
Temperature = Annotated[float, TEMPERATURES]


def check_logit_bias(logit_bias: tuple[tuple[int, float], ...], vocabulary: int) -> None:
    """Raise InputError if a bias is of no token of the vocabulary, or if all are forbidden."""
    largest_id = max((token for token, _ in logit_bias), default=0)
    if largest_id >= vocabulary:
        raise InputError(
            f"logit_bias names token {largest_id}",
            why=f"the vocabulary has {vocabulary} tokens",
            fix="name only ids of the model's vocabulary",
        )
    forbidden = {token for token, bias in logit_bias if bias == -math.inf}
    if len(forbidden) == vocabulary:
        raise InputError(
            "logit_bias forbids every token",
            why=f"it has -inf for all {vocabulary} tokens of the vocabulary",
            fix="leave at least one",
        )


@dataclass(frozen=True)
class SegmentConfig(ranges.Checked):
    """Length of decode segments, and how the sampler adapts to the rows that remain.

    Completions do not depend on these settings, except through the rounding of programs for
    different shapes.
    """

    FLAG = "SegmentConfig"
    steps: Count = 128
    """Decode steps in a segment. After each segment, the host reports finished rows and looks for
    stop strings."""
    min_slots_per_device: Count = 8
    """When no row waits for a slot, the number of slots shrinks to powers of two with the number of
    rows that remain, but not below this number on a device."""
    initial_cache_tokens: Count = 512
    """New tokens per row that the first cache has room for. The room doubles when rows outgrow
    it."""


@dataclass(frozen=True)
class Speculation(ranges.Checked):
    """Speculative decoding: sample several tokens of a row in one step (arXiv 2211.17192).

    A cheap draft proposes the next tokens of a row, and the policy scores all of them at once. Each
    token is then sampled with its own uniform number, as without a draft, and tokens are kept up to
    the first that differs from the draft. Completions are therefore those of plain decoding, except
    through the rounding of programs for different shapes. Only the speed depends on the draft.
    """

    FLAG = "--sampling.speculation"
    tokens: CountOrNone = 0
    """Tokens of a draft; 0 turns speculation off."""
    model: Annotated[str | None, Needs("tokens", why="drafts have none")] = None
    """A small draft model with the same tokenizer: a directory or hub id. By default, drafts are
    looked up: they are the tokens that followed an earlier occurrence of the row's last tokens, in
    its own text or in other completions of its prompt on the same device."""
    ngram: Count = 5
    """Look-up: the largest number of last tokens to match. The longest match is used."""
    most_rows: Count = 8
    """Draft only while at most this many rows are decoded, over all devices; more rows use a device
    well without drafts. If no more rows than this are ever decoded at once, look-up also decodes
    the completions of a prompt one after another, so that later ones can copy from earlier ones."""

    def drafts(self, rows: int) -> bool:
        """Return True if drafts are made when `rows` rows are decoded at once."""
        return self.tokens > 0 and rows <= self.most_rows


@dataclass(frozen=True)
class Thinking(ranges.Checked):
    """The length of thoughts, and the sampling of the answers behind them. Without a limit and
    settings of answers, it is off."""

    FLAG = "--sampling.thinking"
    max_tokens: CountOrNone = 0
    """The largest number of tokens of a thought. A longer one is closed by `close`; such forced
    tokens are not learned. 0: no limit but that of the completion."""
    min_tokens: CountOrNone = 0
    """A thought that ends sooner goes on: what ended it is dropped, and `wait` stands there."""
    close: str = "</think>"
    """The text that ends a thought."""
    wait: str = "\nWait,"
    """The text that a thought goes on with."""
    waits: CountOrNone = 4
    """The most times that a thought is made to go on."""
    answer_top_k: Count | None = None
    """Sample answers from so many of the likeliest tokens; 1: always the likeliest."""

    def __post_init__(self):
        super().__post_init__()
        if not self.close or (self.min_tokens and not self.wait):
            raise InputError(
                "thoughts need texts that end them and that they go on with",
                where="--sampling.thinking.close, --sampling.thinking.wait",
                fix="leave out the flag, or give a text",
            )
        if 0 < self.max_tokens <= self.min_tokens:
            raise InputError(
                f"thoughts of at least {self.min_tokens} and at most {self.max_tokens} tokens",
                where="--sampling.thinking.min-tokens, --sampling.thinking.max-tokens",
                fix="use a larger limit",
            )

    @property
    def is_on(self) -> bool:
        """True if it changes anything."""
        return bool(self.max_tokens or self.min_tokens or self.answer_top_k)


@dataclass(frozen=True)
class SamplerConfig(ranges.Checked):
    """Settings of `sampler.sample`.

    The repetition penalty and the bias change the logits first. The temperature then divides them.
    Truncation goes by the resulting probabilities: top-k, then top-p, then min-p.
    """

    FLAG = "SamplerConfig"
    max_new_tokens: Count
    """Length limit of a completion in tokens, the stop token included."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: Count | None = None
    """Keep the k most likely tokens, and those that are as likely as the last of them."""
    top_p: Annotated[float, In("(0, 1]")] | None = None
    """Keep the smallest set of most likely tokens that has at least this probability, which is
    never empty."""
    min_p: Share | None = None
    """Keep tokens whose probability is at least this fraction of the largest probability."""
    repetition_penalty: Positive = 1.0
    """Divide positive logits of tokens that are in the prompt or the completion already, and
    multiply negative ones (CTRL, arXiv 1909.05858, section 4.1)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number to add to its logit; -inf forbids the token."""
    stop_ids: tuple[CountOrNone, ...] = ()
    """A completion ends with the first of these tokens, which belongs to it."""
    samples_per_prompt: Count = 1
    """Completions of each prompt: the group size."""
    pad_id: int = 0
    """Token id of padding."""
    max_num_seqs: Count = 256
    """Rows decoded at once, over all devices: the number of slots. When a row ends, the next row
    that waits takes its slot."""
    prompt_length: Count | None = None
    """Columns reserved for prompts. The default is the length of the longest prompt, rounded up to
    a power of two. With a fixed number, programs are compiled only once."""
    shapes_of: Annotated[tuple[int, int] | None, Needs("prompt_length")] = None
    """(prompts, completions of each): run the programs of a call of this size, with its slots, its
    pools and its outputs. More rows are sampled in several parts. The default is the call's own
    size."""
    segments: SegmentConfig = SegmentConfig()
    speculation: Speculation = Speculation()
    record_routing: bool = False
    """Return the experts of each token in `Rollout.routing`. Only for mixtures that record them
    (`DecoderConfig.records_routing`), and not with drafts or resumed completions."""

    def __post_init__(self):
        super().__post_init__()
        if not all(token >= 0 and bias < math.inf for token, bias in self.logit_bias):
            raise InputError(
                f"logit_bias is {self.logit_bias!r}",
                where=f"{self.FLAG}.logit_bias",
                why="a bias is a pair of a token id and a number below infinity",
                fix="use others; ids are not negative",
            )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    def rows_of_programs(self, rows: int) -> int:
        """Return the rows of the programs that a call with so many rows runs."""
        return max(rows, math.prod(self.shapes_of or (0,)))

    def of_programs(self) -> SamplerConfig:
        """Return the settings that decode programs depend on, equal for calls that share them.

        The others are in the shapes of arrays. Greedy programs are those of temperature 1, of which
        each call says whether it is greedy. Look-up drafts read groups.
        """
        return replace(
            self,
            max_new_tokens=1,
            temperature=self.temperature or 1.0,
            samples_per_prompt=self.samples_per_prompt if self.speculation.tokens else 1,
            pad_id=0,
            max_num_seqs=1,
            prompt_length=None,
            shapes_of=None,
            segments=SegmentConfig(self.segments.steps),
            record_routing=False,
        )
