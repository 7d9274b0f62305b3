"""Held-out data: how well a model answers problems, ranks pairs and predicts texts.

answer_accuracy  pass@1, pass@k and majority votes of sampled answers, with intervals
calibration      of confidences that answers state: ECE, Brier score, AUROC, a reliability table
guided_accuracy  accuracy against KL of a reference that q guides
pair_accuracy    how well a policy ranks given pairs
pair_audit       pairs whose labels a trained policy contradicts
reward_accuracy  how well a reward model judges pairs and steps
memorization     how much worse variants of known problems are answered, and how alike
verifier_bench   verdicts of a reward against labels, and on spoiled completions
held_out_loss    the loss of held-out texts
"""
