"""How completions are drawn: the settings of the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_rl.errors import InputError


@dataclass(frozen=True)
class Borders:
    """When decoding comes back to the host, and what it then fits to the rows that are left. Results do not depend on
    it, but for the rounding of differently shaped programs."""

    steps: int = 128
    """Decode steps between two borders, where finished rows are handed over and stop strings are looked for."""
    smallest_batch: int = 8
    """When nothing waits, the slots that are left shrink to powers of two, not below this on a device."""
    smallest_cache: int = 512
    """New tokens a row that the first cache has room for; it doubles as rows outgrow it."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding (arXiv 2211.17192): something cheap drafts a row's next tokens, and the policy reads them
    all in one step. Each position is then drawn with its own uniform, as without a draft, and tokens count up to the
    first that the draft did not foresee. So the completions are those of plain decoding but for the rounding of
    differently shaped programs, and only speed depends on the draft."""

    tokens: int = 0
    """Tokens of a draft; 0 is plain decoding."""
    model: str | None = None
    """A small model that drafts, of the same tokenizer: directory or hub id. None: look-up, what followed the row's
    last tokens where they stood before, in its own text and in the other completions of its prompt on its device."""
    ngram: int = 5
    """Look-up: at most so many last tokens are looked for; the longest match counts."""
    most_rows: int = 8
    """Drafts are made while at most so many rows are decoded, over all devices: more fill a device by themselves. If no
    more are decoded from the start, the completions of a prompt are begun one after another, to be looked up."""

    def __post_init__(self):
        for name, least in (("tokens", 0), ("ngram", 1), ("most_rows", 1)):
            if self.__dict__[name] < least:
                why = f"it must be at least {least}"
                raise InputError(f"Speculation.{name} is {self.__dict__[name]}", why=why, fix=f"set {name}")
        if self.model is not None and not self.tokens:
            why, fix = "drafts have no tokens", "set tokens, e.g. to 4, or name no model"
            raise InputError(f"Speculation.model is {self.model!r}", why=why, fix=fix)

    def drafts(self, rows: int) -> bool:
        """Whether so many rows at once are drafted."""
        return self.tokens > 0 and rows <= self.most_rows


@dataclass(frozen=True)
class SamplerConfig:
    """How completions are drawn.

    Logits go through repetition penalty and bias, then temperature; truncation goes by the probabilities that result:
    top-k, then top-p, then min-p.
    """

    max_new_tokens: int
    """Most tokens of a completion, its stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens (and those equal to the last of them)."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability is at least this; always one token or more."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the completion has already are divided by it where positive, multiplied where
    negative (CTRL, arXiv 1909.05858, section 4.1)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); -inf forbids the token."""
    stop_ids: tuple[int, ...] = ()
    """A completion ends with the first of these that it draws, and holds it."""
    samples_per_prompt: int = 1
    """Completions of each prompt: the size of a group."""
    pad_id: int = 0
    """What stands after a row's last token."""
    max_rows: int = 256
    """Rows decoded at once, over all devices: the slots. A row that ends leaves its slot to the next that waits."""
    prompt_length: int | None = None
    """Columns reserved for prompts; None: the next power of two of the longest. Fix it to compile once."""
    borders: Borders = Borders()
    speculation: Speculation = Speculation()

    def __post_init__(self):
        def check(good: bool, name: str, needs: str) -> None:
            if not good:
                value = self.__dict__[name]
                raise InputError(f"SamplerConfig.{name} is {value!r}", why=f"it must be {needs}", fix=f"set {name}")

        for name in ("max_new_tokens", "samples_per_prompt", "max_rows"):
            check(self.__dict__[name] >= 1, name, "at least 1")
        for name in ("top_k", "prompt_length"):
            check(self.__dict__[name] is None or self.__dict__[name] >= 1, name, "at least 1, or None")
        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number, 0 or more")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1, or None")
        check(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "between 0 and 1, or None")
        penalty = self.repetition_penalty
        check(math.isfinite(penalty) and penalty > 0, "repetition_penalty", "a finite number above 0; 1 is none")
        good = all(token >= 0 and bias < math.inf for token, bias in self.logit_bias)
        check(good, "logit_bias", "pairs of a token id and a number below infinity")
        check(all(stop >= 0 for stop in self.stop_ids), "stop_ids", "a tuple of token ids")
        check(min(vars(self.borders).values()) >= 1, "borders", "numbers of at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
