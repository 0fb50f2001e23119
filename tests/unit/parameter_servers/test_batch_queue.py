"""Each batch once, whoever asks in which order."""

from __future__ import annotations

import random

from evenstep.parameter_servers.batch_queue import BatchQueue


def test_every_batch_is_finished_once_in_any_order(fresh_seed: int):
    """Workers take, finish and end at random; in place of one that ended comes another, as from the beginning."""
    draw = random.Random(fresh_seed)
    queue = BatchQueue()
    finished: list[tuple[int, int]] = []
    held: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(4)}
    epochs = dict.fromkeys(held, 0)
    for _ in range(1000):
        worker = draw.choice(list(held))
        action = draw.random()
        if action < 0.1:
            queue.give_back(worker)
            del held[worker]
            new = max(epochs) + 1
            epochs[new], held[new] = 0, []
        elif action < 0.5:
            queue.finish(worker)
            finished += held[worker]
            held[worker] = []
        else:
            taken = queue.take(worker, (1, epochs[worker], 0), 7, "")
            if taken.batch >= 0:
                held[worker].append((taken.epoch, taken.batch))
            elif epochs[worker] < 2:  # goes on, as in "async"
                assert taken.is_over == (sum(epoch == taken.epoch for epoch, _ in finished) == 7)
                epochs[worker] += 1
    for worker in held:
        queue.finish(worker)
        finished += held[worker]
    assert sorted(finished) == [(epoch, batch) for epoch in range(3) for batch in range(7)]
    assert queue.take(99, (1, 2, 0), 7, "").is_over


def test_another_loader_is_named():
    queue = BatchQueue()
    assert queue.take(0, (1, 0, 0), 7, "shuffled").batch == 0
    assert "worker 1 has another loader" in queue.take(1, (1, 0, 0), 7, "sorted").failure
    assert queue.take(1, (2, 0, 0), 5, "sorted").batch == 0, "another loader of the script has its own"
