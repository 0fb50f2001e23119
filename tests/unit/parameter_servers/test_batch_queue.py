"""Each batch once, whoever asks in which order."""

from __future__ import annotations

import json
import random

from evenstep.parameter_servers.server.batch_queue import BatchQueue


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
            queue.finish((worker, 0))
            finished += held[worker]
            held[worker] = []
        else:
            taken = queue.take((worker, 0), (1, epochs[worker], 0), 7, "")
            if taken.batch >= 0:
                held[worker].append((taken.epoch, taken.batch))
            elif epochs[worker] < 2:  # goes on, as in "async"
                assert taken.is_over == (sum(epoch == taken.epoch for epoch, _ in finished) == 7)
                epochs[worker] += 1
    for worker in held:
        queue.finish((worker, 0))
        finished += held[worker]
    assert sorted(finished) == [(epoch, batch) for epoch in range(3) for batch in range(7)]
    assert queue.take((99, 0), (1, 2, 0), 7, "").is_over


def test_another_loader_is_named():
    queue = BatchQueue()
    assert queue.take((0, 0), (1, 0, 0), 7, "shuffled").batch == 0
    assert "worker 1 has another loader" in queue.take((1, 0), (1, 0, 0), 7, "sorted").failure
    assert queue.take((1, 0), (2, 0, 0), 5, "sorted").batch == 0, "another loader of the script has its own"


def test_a_state_has_what_is_finished_and_no_more(fresh_seed: int):
    """Taken at any moment, and given to another queue: each batch is finished once."""
    draw = random.Random(fresh_seed)
    queue, finished, held, number = BatchQueue(), [], {}, 0
    for _ in range(30):
        for _ in range(draw.randrange(25)):
            if held and draw.random() < 0.5:
                key = draw.choice(list(held))
                if draw.random() < 0.2:
                    queue.give_back(key[0], key)
                    del held[key]
                else:
                    queue.finish(key)
                    finished.append(held.pop(key))
                continue
            number += 1
            key = (draw.randrange(3), number)
            epoch = next((each for each in range(3) if sum(e == each for e, _ in [*finished, *held.values()]) < 11), 2)
            taken = queue.take(key, (1, epoch, 0), 11, '{"seed": 3}')
            if taken.batch >= 0:
                held[key] = (taken.epoch, taken.batch)
        state = json.loads(json.dumps(queue.state()))
        queue = BatchQueue()
        queue.load_state(state)
        held = {}
        assert queue.state() == state
    while True:
        number += 1
        taken = queue.take((9, number), (1, 2, 0), 11, '{"seed": 3}')
        if taken.batch < 0:
            break
        queue.finish((9, number))
        finished.append((taken.epoch, taken.batch))
    assert len(finished) == len(set(finished))
    begun = {epoch for epoch, _ in finished}
    assert sorted(finished) == [(epoch, batch) for epoch in sorted(begun) for batch in range(11)]
    assert taken.is_over


def test_batches_that_were_finished_out_of_order_count_once_after_two_restarts():
    """Else a pass would never be over, or be over while batches are open."""

    def restarted(queue: BatchQueue) -> BatchQueue:
        again = BatchQueue()
        again.load_state(json.loads(json.dumps(queue.state())))
        return again

    queue, wanted = BatchQueue(), (1, 0, 0)
    for number in range(4):
        assert queue.take((0, number), wanted, 6, "{}").batch == number
    for number in (0, 2, 3):
        queue.finish((0, number))
    queue = restarted(queue)  # batch 1 was held, and is open again
    assert queue.take((0, 9), wanted, 6, "{}").batch == 1
    queue.finish((0, 9))
    queue = restarted(queue)
    assert [queue.take((0, number), wanted, 6, "{}").batch for number in (10, 11)] == [4, 5]
    assert not queue.take((0, 12), wanted, 6, "{}").is_over
    queue.finish((0, 10))
    assert not queue.take((0, 12), wanted, 6, "{}").is_over
    queue.finish((0, 11))
    assert queue.take((0, 12), wanted, 6, "{}").is_over
