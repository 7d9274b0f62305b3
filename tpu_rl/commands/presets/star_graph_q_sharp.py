"""Q# on star graphs: a q that starts as the pretrained model learns which of that model's own paths
end at the goal.

The first node after the center tells nothing about the end until edges have been followed from it,
so q's loss on it stays flat for long. Hence q starts with all pretrained layers and keeps their
next-token loss, all tokens of a path are labeled, and each graph is new. The two paths of a graph
are learned from together.

It then guides the model, with CD and FUDGE on the same q for comparison:

    python launch/evaluate.py runs/star_graph_pretrain/model --guide runs/star_graph_q_sharp
        --baseline cd fudge

Four candidates are enough: in a graph of degree 2 the model knows at most two next nodes.
"""

from dataclasses import replace

from tpu_rl.algos import QSharpConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig
from tpu_rl.commands.presets import star_graph_grpo
from tpu_rl.train.optimizers import OptimizerConfig

BASE = star_graph_grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=QSharpConfig(candidates=4, prompts=262_144, roll_in="none", next_token_coef=0.1),
    data=replace(BASE.data, rows=1_000_000),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, beta2=0.98),
    # A row of 128 tokens holds four graphs with two paths each.
    batch=BatchConfig(prompts=128, group_size=2, row_length=128, micro_batch_rows=32),
    evaluation=EvaluationConfig(rows=500, interval=250),
    steps=4000,
    checkpoint_every=250,
)
