"""The page of the recipes in recipes/chains, from what they measured.

    python recipes/chains/make_rows.py --to runs/chain_rows
    python launch/recipe.py recipes/chains/NAME.yaml --seeds 0 1 2
    python bench/chains.py --runs runs
    python bench/chains.py --page

--runs adds the values of the recipes that have run in this folder to RESULTS, and --page writes the
page from RESULTS.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import arms
import paired

from tpu_rl.report import markdown

RESULTS = arms.ROOT / "docs/benchmarks/chains.jsonl"
PAGE = arms.ROOT / "docs/benchmarks/chains.md"


class Chain(NamedTuple):
    """A recipe, what it asks, and the contrasts that answer it."""

    title: str
    question: str
    contrasts: tuple[tuple[str, str], ...]
    """Stages whose values are subtracted, on each set of problems."""


CHAINS = {
    "arms": Chain(
        "Imitation, preferences, RL, and both",
        "Which arm gains most from the same start, does imitation before RL help, how much of it, "
        "and does a share of the reward for each right step? (after Think2SQL, E49, and studies of "
        "SFT before RL, E21)",
        (
            *(("sft_worked", "sft_bare"), ("dpo", "grpo"), ("orpo", "grpo"), ("grpo_fine", "grpo")),
            *(("bare_grpo", "grpo"), ("worked_grpo", "grpo"), ("long_grpo", "worked_grpo")),
            ("worked_grpo", "sft_long"),
        ),
    ),
    "relift": Chain(
        "RL with imitation of what it never solves",
        "Do six steps of SFT on unsolved problems before every ten of GRPO help? (after ReLIFT, "
        "E10)",
        (("rl_3", "rl_alone_3"),),
    ),
    "imitation_after": Chain(
        "RL, then imitation",
        "After RL: own answers to problems that are solved in part and solutions of those that "
        "never are, or more RL? (after Metis-RISE, E28)",
        (("sft", "rl"), ("rl_longer", "rl"), ("sft", "rl_longer")),
    ),
    "routing": Chain(
        "Easy problems to imitation, hard ones to RL",
        "Does the split by pass rate gain more than its opposite and than a random one? (after "
        "DeReason, E07)",
        (("grpo_hard", "grpo_random"), ("grpo_hard", "grpo_easy")),
    ),
    "diagnosis": Chain(
        "RL, imitation of the weakest concept, RL",
        "Does imitation of the concept that RL is weakest in gain more than RL for as many steps? "
        "(after RedOne 2.0, E29)",
        (("refine", "explore_longer"),),
    ),
    "domains": Chain(
        "One domain after the other",
        "Sums before products, products before sums, or both at once? The second stage has a "
        "longer limit. (after AceReason, F15)",
        (("then_products", "then_sums"), ("then_products", "both_2"), ("then_sums", "both_2")),
    ),
    "refit": Chain(
        "A reward model that is fitted again",
        "Does a reward model of the present policy's completions gain more than the first one? "
        "`well_formed` is the share of answers in the right form (F22).",
        (("rl_3", "rl_fixed_3"),),
    ),
    "stages": Chain(
        "Texts, demonstrations, preferences, a last touch",
        "What does each stage add to the domain, products, and take from short sums? (after "
        "StatLLaMA, E17)",
        (("sft", "texts"), ("dpo", "sft"), ("light", "dpo"), ("strong", "dpo")),
    ),
    "without_sft": Chain(
        "PPO from the first model, or after SFT",
        "PPO against a reward model, without SFT before it: does it keep more of what the model "
        "could do, the short expressions? (after Mistral-Plus, F24)",
        (("ppo", "sft_ppo"), ("sft", "ppo")),
    ),
}


def read_runs(folder: Path) -> None:
    """Put the values of the recipes in a folder into RESULTS, in place of older ones."""
    known = {line["chain"]: line for line in arms.read_lines(RESULTS)}
    for name in CHAINS:
        summary = folder / name / "summary.json"
        if summary.exists():
            content = json.loads(summary.read_text(encoding="utf-8"))
            values = {
                problems: {stage: numbers["seeds"] for stage, numbers in stages.items()}
                for problems, stages in content["evaluations"].items()
            }
            known[name] = {"chain": name, "seeds": content["seeds"], "values": values}
    lines = [json.dumps(known[name]) + "\n" for name in CHAINS if name in known]
    RESULTS.write_text("".join(lines), encoding="utf-8")


HEAD = """# Chains of stages on arithmetic

This page is generated: `python bench/chains.py --page` writes it from `chains.jsonl` beside it,
which `python bench/chains.py --runs runs` fills after the commands below. 30 November 2026, 2 CPU
cores that did other work too.

Each recipe is the skeleton of a published chain, on expressions that the shipped model partly
solves: stages of 8 to 60 steps, minutes in all. So a table shows what the order of stages does
here, and not whether a paper is right. Values are accuracies in percent of 500 held-out problems a
set at temperature 1. Contrasts are points, paired on seeds, with the 95 % interval over seeds.

```
python recipes/chains/make_rows.py --to runs/chain_rows
python launch/recipe.py recipes/chains/NAME.yaml --seeds 0 1 2
```
"""


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the page."""
    sections = [HEAD]
    for line in lines:
        chain = CHAINS[line["chain"]]
        text = f"`recipes/chains/{line['chain']}.yaml`. {chain.question}"
        sections.append(f"## {chain.title}\n\n{textwrap.fill(text, 100)}\n")
        values = line["values"]
        stages = list(next(iter(values.values())))
        rows = [[stage, *(spread(sets[stage]) for sets in values.values())] for stage in stages]
        sections.append(f"{markdown.table(('after', *values), rows)}\n")
        contrasts = [
            [f"{a} minus {b}", *(difference(sets[a], sets[b]) for sets in values.values())]
            for a, b in chain.contrasts
        ]
        sections.append(f"{markdown.table(('contrast', *values), contrasts)}\n")
    return "\n".join(sections)


def spread(shares: list[float]) -> str:
    """Return the mean of the seeds in percent, and the seeds."""
    mean = 100 * sum(shares) / len(shares)
    return f"{mean:.1f} ({', '.join(f'{100 * share:.1f}' for share in shares)})"


def difference(a: list[float], b: list[float]) -> str:
    """Return a - b in points with its interval over seeds."""
    return paired.interval([100 * (x - y) for x, y in zip(a, b, strict=True)], "+.1f")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the recipes' run folders")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.runs:
        read_runs(flags.runs)
    if flags.page:
        PAGE.write_text(summarize(arms.read_lines(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
