"""Write rows that train a judge, from completions whose labels are known:

    python recipes/judge_rows.py labeled.jsonl --to judge.jsonl
    python launch/run.py grpo --model.path models/smollm2 --data.path judge.jsonl --reward verdict

The rows that are read have `prompt`, `completion` and `label` (1 or true for right, 0 or false for
wrong), and may have `answer`, as launch/check_reward.py reads them. The rows that are written have
the message that the reward `judge` sends as `prompt`, its verdict as `answer`, and as `completion`
the verdict to imitate. With --reasons the judge writes reasons before its verdict, and there is
nothing to imitate. --balance leaves out rows until those of each label are equally many.

--invalid is for judge(model=DIR, invalid=0), which has a third verdict. Rows may then have the
label "invalid", and each other one gives a spoiled row: a right answer is cut off, repeats itself,
refuses or is missing, which is invalid, and a wrong one says that it has been verified.

A row with `prompt`, `chosen` and `rejected` becomes two, as `pair_judge` asks: in both orders.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl.environments.answer_text import without_thoughts
from tpu_rl.studies import verifier_bench
from tpu_rl.verifiers import judge, verdicts

LABELS = {1: "Yes", 0: "No", "invalid": "Invalid"}
REFUSALS = (
    "I cannot answer this.",
    "I'm sorry, but I can't help with that.",
    "I do not know.",
    "As an AI, I am not able to solve this problem.",
)


def spoiled(labeled: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Spoil a labeled completion: praise a wrong one, and make a right one invalid.

    What is kept of a right one ends before its answer, if the row says the answer.
    """
    text = without_thoughts(labeled["completion"])
    if not labeled["label"]:
        return {**labeled, "completion": text + verifier_bench.PRAISE}
    answer = str(labeled.get("answer", ""))
    end = text.find(answer) if answer and answer in text else len(text) // 2
    part = text[: rng.randint(0, end)]
    ways = (part, 8 * part, rng.choice(REFUSALS), "")
    return {**labeled, "completion": rng.choice(ways), "label": "invalid"}


def rows_of(
    labeled: Mapping[str, Any], reasons: bool, invalid: bool = False
) -> list[dict[str, Any]]:
    """Make the row of a labeled completion, or the two rows of a pair."""
    if "chosen" in labeled:
        chosen, rejected = (without_thoughts(labeled[key]) for key in ("chosen", "rejected"))
        return [
            row_of(
                verdicts.pair_request(labeled["prompt"], one, other, judge.IS_BETTER, int(reasons)),
                verdict,
                reasons,
            )
            for one, other, verdict in ((chosen, rejected, "A"), (rejected, chosen, "B"))
        ]
    data = {
        "Problem": verdicts.conversation(labeled["prompt"]),
        "Answer": without_thoughts(labeled["completion"]),
    }
    if "answer" in labeled:
        data["Reference answer"] = str(labeled["answer"])
    choices = verdicts.YES_NO_INVALID if invalid else verdicts.YES_NO
    message = verdicts.request(data, judge.IS_RIGHT, choices, int(reasons))
    return [row_of(message, LABELS[labeled["label"]], reasons)]


def row_of(message: str, verdict: str, reasons: bool) -> dict[str, Any]:
    """Make a row of a message and its verdict."""
    row = {"prompt": [{"role": "user", "content": message}], "answer": verdict}
    return row if reasons else row | {"completion": verdict}


def is_readable(row: Mapping[str, Any], labels: Sequence[Any]) -> bool:
    """Return True for a completion with a prompt and one of the labels, and for a pair."""
    is_pair = {"prompt", "chosen", "rejected"} <= row.keys()
    return is_pair or ({"prompt", "completion"} <= row.keys() and row.get("label") in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows that train a judge.")
    parser.add_argument("labeled", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--reasons", action="store_true")
    parser.add_argument("--invalid", action="store_true", help="with the third verdict")
    parser.add_argument("--balance", action="store_true")
    given = parser.parse_args()
    lines = given.labeled.read_text(encoding="utf-8").splitlines()
    labeled = [json.loads(line) for line in lines if line.strip()]
    labels = [*LABELS] if given.invalid else [1, 0]
    for number, row in enumerate(labeled, 1):
        if not is_readable(row, labels):
            sys.exit(
                f"error: {given.labeled}, row {number}: neither prompt, completion and label of 0 "
                'or 1 (with --invalid also "invalid"), nor prompt, chosen and rejected'
            )
    rng = random.Random(0)
    if given.invalid:
        labeled += [spoiled(row, rng) for row in labeled if row.get("label") in (0, 1)]
    rng.shuffle(labeled)
    if given.balance:
        kinds = [[row for row in labeled if row.get("label") == label] for label in labels]
        pairs = [row for row in labeled if "chosen" in row]
        fewest = min(map(len, kinds))
        labeled = [*pairs, *(row for kind in kinds for row in kind[:fewest])]
        rng.shuffle(labeled)
    settings = (given.reasons, given.invalid)
    rows = [json.dumps(row) + "\n" for each in labeled for row in rows_of(each, *settings)]
    given.to.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows)} rows written to {given.to}")


if __name__ == "__main__":
    main()
