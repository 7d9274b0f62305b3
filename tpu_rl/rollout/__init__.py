"""The rollout engine: from data rows to scored completions.

requests           `Engine(generate, score, resume)`: all that a source of experience knows
engine             makes an engine of small values
conversations      a wing: the policy's turns, and what an environment answers
prompts            data rows as token ids; stop strings
weights            the copy of the weights that the sampler reads
streaming_rewards  rewards computed while other rows are still being decoded
group_selection    ends a rollout once enough groups are complete (partial rollouts)
scoring            rewards of sampled completions, across processes
dynamic_sampling   replaces groups that teach nothing (DAPO)
records            metrics, samples and warnings of scored completions
samples            what samples.jsonl keeps of them, and of their tokens
pictures           small copies of the pictures of samples
"""
