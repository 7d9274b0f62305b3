"""Measurements beyond those that a run makes of itself.

comparison       two models on the same problems, paired
guided_accuracy  accuracy against KL of a reference that q guides
harness          tasks of lm-evaluation-harness
memorization     how much worse variants of known problems are answered, and how alike
model_kl         the KL between two models on the answers of one
pair_audit       pairs whose labels a trained policy contradicts
step_search      answers that a step-wise search with a verifier finds
verifier_bench   verdicts of a reward against labels, and on spoiled completions
"""
