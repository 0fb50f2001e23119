"""Recommendations from ratings, with tables of users and items on parameter servers.

    evenstep run --servers 2 --nproc-per-node 2 examples/recommender.py
    python examples/recommender.py                                            # one process: worker and server at once

A two-tower model: a user's vector comes from a row of the table of users, an item's from its own row and those of its
tags, and their product says whether the user likes the item. The ratings are generated: users and items have hidden
tastes, and tags say something about an item's. So what the model has learned can be measured: on ratings that it hasn't
seen, how often a liked item is ranked above a disliked one (AUC: 0.5 is chance).
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

NUM_TASTES, NUM_TAGS, TAGS_PER_ITEM = 4, 40, 3


def make_ratings(num_users, num_items, num_ratings):
    """(user, item, tags of the item, liked) of each rating; few users and items have most of them."""
    generator = torch.Generator().manual_seed(7)
    tag_tastes = F.normalize(torch.randn(NUM_TAGS, NUM_TASTES, generator=generator))
    tags = torch.randint(NUM_TAGS, (num_items, TAGS_PER_ITEM), generator=generator)
    item_tastes = tag_tastes[tags].mean(1) + 0.3 * torch.randn(num_items, NUM_TASTES, generator=generator)
    user_tastes = torch.randn(num_users, NUM_TASTES, generator=generator)
    users, items = ((n * torch.rand(num_ratings, generator=generator) ** 2).long() for n in (num_users, num_items))
    score = 3 * (user_tastes[users] * item_tastes[items]).sum(1)
    liked = (torch.rand(num_ratings, generator=generator) < torch.sigmoid(score)).float()
    return TensorDataset(users, items, tags[items], liked)


class TwoTowers(nn.Module):
    def __init__(self, num_users, num_items, dim):
        super().__init__()
        options = {"optimizer": "rowwise_adagrad", "lr": 0.1, "init_std": 0.1}
        self.users = evenstep.RemoteEmbedding(num_users, dim, **options)
        self.items = evenstep.RemoteEmbedding(num_items, dim, **options)
        self.tags = evenstep.RemoteEmbedding(NUM_TAGS, dim, pooling="mean", **options)
        self.user_tower = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.item_tower = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, users, items, tags):
        user = self.users(users)
        user = user + self.user_tower(user)
        item = self.items(items)
        item = item + self.item_tower(torch.cat([item, self.tags(tags)], 1))
        return (user * item).sum(1)


@torch.no_grad()
def evaluate(model, ratings):
    """The share of pairs of a liked and a disliked rating in which the liked one has the higher score."""
    users, items, tags, liked = ratings.tensors
    scores = torch.cat([model(users[i], items[i], tags[i]) for i in torch.arange(len(liked)).split(1024)])
    ranks = torch.empty(len(scores)).index_copy_(0, scores.argsort(), torch.arange(1.0, len(scores) + 1))
    num_liked = int(liked.sum())
    num_disliked = len(liked) - num_liked
    return (ranks[liked == 1].sum().item() - num_liked * (num_liked + 1) / 2) / max(1, num_liked * num_disliked)


def main():
    parser = argparse.ArgumentParser(description="a two-tower model with tables of embeddings on parameter servers")
    parser.add_argument("--mode", choices=["sync", "async", "bounded"], default="async")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512, help="ratings of a worker's step")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=16)
    args = parser.parse_args()

    data = make_ratings(args.users, args.items, args.ratings)
    num_test = args.ratings // 20
    test, train = (
        TensorDataset(*(each[part] for each in data.tensors)) for part in (slice(num_test), slice(num_test, None))
    )

    torch.manual_seed(0)
    with evenstep.parameter_server(
        lambda: TwoTowers(args.users, args.items, args.dim),
        lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        mode=args.mode,
        max_staleness=4 if args.mode == "bounded" else None,
    ) as ps:
        loader = evenstep.DataLoader(train, global_batch_size=args.batch_size, shuffle=True, queue=ps.queue())
        for epoch in loader.epochs(args.epochs):
            start, count, total = time.perf_counter(), 0, 0.0
            for users, items, tags, liked in loader:
                loss = F.binary_cross_entropy_with_logits(ps(users, items, tags), liked)
                ps.backward(loss, weight=len(liked))
                ps.step()
                count += len(liked)
                total += loss.item() * len(liked)
            seconds = time.perf_counter() - start
            text = f"loss {total / count:.3f}, {count / seconds:,.0f} ratings a second" if count else "no batch"
            if ps.worker == 0:
                ps.pull()
                text += f", AUC on ratings not seen {evaluate(ps.model, test):.3f}"
            print(f"worker {ps.worker}, epoch {epoch}: {text}", flush=True)
        if ps.worker == 0:
            norms = [rows.norm(dim=1).mean().item() for rows in (ps.model.users.rows(0, 100), ps.model.tags.rows())]
            assert all(map(math.isfinite, norms))
            print(f"mean length of rows: frequent users {norms[0]:.2f}, tags {norms[1]:.2f}")


if __name__ == "__main__":
    main()
