"""Q# on star graphs: a q that starts as the pretrained model learns which of that model's own paths
end at the goal.

It then guides the model, with CD and FUDGE on the same q for comparison:

    python launch/evaluate.py runs/star_graph_pretrain/model --guide runs/star_graph_q_sharp
        --baseline cd fudge

Four candidates are enough: in a graph of degree 2 the model knows at most two next nodes.
"""

from dataclasses import replace

from launch.config import BatchConfig, EvaluationConfig
from launch.presets import star_graph_grpo
from tpu_rl.algos import QSharpConfig
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    star_graph_grpo.CONFIG,
    # The paper's weights and its filter, with which docs/benchmarks/star_graphs.md was measured.
    algorithm=QSharpConfig(
        candidates=4,
        prompts=49_152,
        loss_aggregation="sequence_mean",
        drop_equal_returns=True,
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, schedule="cosine", warmup_steps=50, beta2=0.98, weight_decay=0.1
    ),
    batch=BatchConfig(prompts=128, group_size=2, row_length=108, micro_batch_rows=32),
    evaluation=EvaluationConfig(rows=500, interval=250),
    steps=2000,
    checkpoint_every=250,
)
