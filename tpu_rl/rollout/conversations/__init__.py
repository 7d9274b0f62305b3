"""Conversations with environments, for runs with `--environment`.

batches      the episodes of a request, of environments or agents
engine       the policy's turns, and what an environment answers
episodes     the host's side: environments that answer what the policy wrote
episode_log  what happened in an episode, from which it goes on in another step
rounds       which episodes a step learns from, when others go on
"""
