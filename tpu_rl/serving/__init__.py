"""Programs from outside that talk to the model: an HTTP server, and training on what they do.

protocol   bodies of requests and answers, as OpenAI's and vLLM's servers have them
chat       messages to token ids, such that nothing the model wrote is encoded again
record     all calls of an episode as rows of token ids that share prefixes
pump       the sampler's side: turns of many calls are decoded together
app        accounts, and the completions of their calls
routes     the routes, as an ASGI application
http       requests and responses of any server: limits, keys, errors
server     the socket and the thread that the application runs in
"""
