"""Held-out data: how well a model answers problems, ranks pairs and predicts texts.

answer_accuracy  pass@1, pass@k and majority votes of sampled answers, with intervals
calibration      of confidences that answers state: ECE, Brier score, AUROC, a reliability table
pair_accuracy    how well a policy ranks given pairs
reward_accuracy  how well a reward model judges pairs and steps
held_out_loss    the loss of held-out texts
"""
