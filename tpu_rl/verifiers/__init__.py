"""Built-in rewards: functions that judge completions. Each file has the rows of its `VERIFIERS`.

`tpu_rl.wings` names the file of each reward. actions, choice, confidence, gsm8k_answers, length,
math_verify_pool, others, programs, recall, sets, similarity, sql_pool, text_form, tool_matching and
unit_test_quality have rewards; composed has rewards of other rewards, and readers of references;
embedding and implicit read language models.
"""
