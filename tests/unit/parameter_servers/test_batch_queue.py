"""Each batch once, whoever asks in which order."""

from __future__ import annotations

import json
import random

from evenstep.parameter_servers.deciding.batch_queue import Batch, BatchQueue


def test_every_batch_is_finished_once_in_any_order(fresh_seed: int):
    """Workers take, finish and end at random; in place of one that ended comes another, as from the beginning.

    Also from a state that was taken at any moment, and given to another queue.
    """
    draw = random.Random(fresh_seed)
    queue = BatchQueue()
    finished: list[Batch] = []
    held: dict[int, list[Batch]] = {worker: [] for worker in range(4)}
    epochs = dict.fromkeys(held, 0)
    for _ in range(1000):
        worker = draw.choice(list(held))
        action = draw.random()
        if action < 0.02:
            state = json.loads(json.dumps(queue.state()))
            queue = BatchQueue()
            queue.load_state(state)
            assert queue.state() == state
            held, epochs = {each: [] for each in held}, dict.fromkeys(held, 0)
        elif action < 0.1:
            assert queue.give_back(worker) == sorted(held.pop(worker))
            new = max(epochs) + 1
            epochs[new], held[new] = 0, []
        elif action < 0.5:
            some = draw.randint(0, len(held[worker]))  # with workers of a loader, others are taken ahead
            queue.finish(worker, held[worker][:some])
            finished += held[worker][:some]
            held[worker] = held[worker][some:]
        else:
            taken = queue.take(worker, (1, epochs[worker], 0), 7, "")
            if taken.batch is not None:
                held[worker].append(taken.batch)
            elif epochs[worker] < 2:  # goes on, as in "async"
                assert taken.is_over == (sum(at[1] == epochs[worker] for at, _ in finished) == 7)
                epochs[worker] += 1
    for worker in held:
        queue.finish(worker, held[worker])
        finished += held[worker]
    assert sorted(finished) == [((1, epoch, 0), batch) for epoch in range(3) for batch in range(7)]
    assert queue.take(99, (1, 2, 0), 7, "").is_over


def test_what_a_worker_does_not_hold_is_neither_finished_nor_given_back():
    queue, wanted = BatchQueue(), (1, 0, 0)
    batch = queue.take(0, wanted, 2, "").batch
    assert batch is not None
    assert queue.give_back(0, [batch]) == [batch]
    assert queue.take(1, wanted, 2, "").batch == batch
    queue.finish(0, [batch])  # the push of a worker that was lost meanwhile
    assert queue.give_back(0, [batch]) == []
    assert not queue.take(0, wanted, 1 + 1, "").is_over
    queue.finish(0, [(wanted, 1)])
    assert not queue.take(0, wanted, 2, "").is_over
    queue.finish(1, [batch])
    assert queue.take(0, wanted, 2, "").is_over
