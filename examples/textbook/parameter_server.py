"""The parameter server program: trainers push gradients to a process that has the parameters, and get them back.

    python examples/textbook/parameter_server.py
    python examples/textbook/parameter_server.py --with torch

With torch it is written with RPC, as textbooks do: the server waits for the gradients of all trainers, takes a step
with their mean, and answers all of them. With evenstep the same is mode="sync".
"""

import argparse
import os
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.futures import Future

import evenstep

NUM_SAMPLES, NUM_FEATURES = 1200, 100


def load_data():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    targets = features @ torch.randn(NUM_FEATURES, 1, generator=generator) / NUM_FEATURES**0.5
    return features, targets + 0.3 * torch.randn(NUM_SAMPLES, 1, generator=generator)


def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(NUM_FEATURES, 1)


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def batches(worker, num_workers, args):
    """This worker's share of each batch."""
    features, targets = load_data()
    for epoch in range(args.epochs):
        generator = torch.Generator().manual_seed(epoch)
        for batch in torch.randperm(NUM_SAMPLES, generator=generator).split(args.batch_size):
            mine = batch[worker::num_workers]
            yield features[mine], targets[mine]


def report(worker, model):
    features, targets = load_data()
    with torch.no_grad():
        loss = F.mse_loss(model(features), targets)
    if worker == 0:
        print(f"final loss: {loss:.4f}", flush=True)


# ---------------------------------------------------------------------- with evenstep


def train(args):
    with evenstep.parameter_server(build_model, build_optimizer, mode="sync") as ps:
        for x, y in batches(ps.worker, ps.num_workers, args):
            ps.backward(F.mse_loss(ps(x), y), weight=len(x))
            ps.step()
    report(ps.worker, ps.model)


# ---------------------------------------------------------------------- with torch


class Server:
    def __init__(self, num_trainers):
        self.model = build_model()
        self.optimizer = build_optimizer(self.model.parameters())
        self.lock = threading.Lock()
        self.answer = Future()
        self.num_trainers = num_trainers
        self.num_pushed = 0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def push(server, gradients):
        self = server.local_value()
        with self.lock:
            answer = self.answer
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / self.num_trainers
            self.num_pushed += 1
            if self.num_pushed == self.num_trainers:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.num_pushed, self.answer = 0, Future()
                answer.set_result(self.model)
        return answer


def trainer(server, worker, args):
    model = server.rpc_sync().get_model()
    for x, y in batches(worker, args.workers, args):
        F.mse_loss(model(x), y).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(server.owner(), Server.push, args=(server, gradients))
    report(worker, model)


def run_torch(rank, args, meeting_point):
    torch.set_num_threads(1)  # spawned processes would otherwise take all cores each
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # RPC would listen where the host's name leads, for everybody
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    name = "server" if rank == args.workers else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.workers + 1, rpc_backend_options=options)
    if rank == args.workers:
        server = rpc.RRef(Server(args.workers))
        for future in [rpc.rpc_async(f"trainer{each}", trainer, (server, each, args)) for each in range(args.workers)]:
            future.wait()
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a parameter server and its trainers, with processes of its own")
    parser.add_argument("--with", dest="classes", choices=["evenstep", "torch"], default="evenstep")
    parser.add_argument("--workers", type=int, default=2, help="processes that compute gradients")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=60, help="samples of all workers in a step")
    args = parser.parse_args()
    if args.classes == "evenstep":
        evenstep.launch(train, args.workers, (args,), servers=1, device="cpu")
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_torch, args=(args, Path(folder) / "meeting-point"), nprocs=args.workers + 1)
