"""A server for the client package `tinker`: training loops that run elsewhere, on this machine.

The protocol is that of tinker 0.38.0 (Thinking Machines Lab), read from its client. A client makes
a session, in it training clients (each one low-rank adapter on the model of the server) and
sampling clients (a snapshot of an adapter, or the model alone). What it asks for is queued, and it
polls for the results.

    app       the routes, in the thread of the server
    wire      the bodies in protocol buffers: data with their losses, and answers
    service   sessions, the queues of clients, results; one thread owns the devices
    learner   the programs: log-probs, gradients, Adam
    losses    the losses of the protocol, of the functions in `losses` and `algos`
    sampling  completions and log-probs of prompts, of many adapters together
    store     saved states on disk

The way of the data: `wire.Datum` (token ids, targets, numbers of each token) -> `learner.Batch`
(packed rows) -> gradients, which add up in `learner.Adapter` until its optimizer takes a step.
"""
