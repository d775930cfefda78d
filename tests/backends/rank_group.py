"""Several ranks on loopback: real processes over gloo that run one function, and what each returns.

The processes are forked from a server that has imported torch and transformers, so that a group starts in
less than a second.
"""

import multiprocessing
import pickle

import torch

from slime.backends.torch.ranks import Ranks, find_store, join, open_store

TIMEOUT = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.backends.rank_group", "slime.backends.torch.trainer"])


def run_group(size, function, *arguments):
    """Results of ``function(ranks, *arguments)``, by rank; a rank that fails writes its error to stderr."""
    pipes = [_context.Pipe() for _ in range(size)]
    processes = [
        _context.Process(target=_rank, args=(rank, size, pipe[1], function, arguments), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        port = pipes[0][0].recv()
        for pipe, _ in pipes[1:]:
            pipe.send(port)
        return [_received(pipe, rank) for rank, (pipe, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def _received(pipe, rank):
    assert pipe.poll(TIMEOUT), f"rank {rank} does not answer"
    return pickle.loads(pipe.recv_bytes())


def _rank(rank, size, pipe, function, arguments):
    torch.set_num_threads(1)
    if rank == 0:
        store = open_store("127.0.0.1", size, TIMEOUT)
        pipe.send(store.port)
    else:
        store = find_store("127.0.0.1", pipe.recv(), TIMEOUT)
    ranks = Ranks(rank, size)
    join(ranks, store, device=torch.device("cpu"), timeout=TIMEOUT)
    pipe.send_bytes(pickle.dumps(function(ranks, *arguments)))
