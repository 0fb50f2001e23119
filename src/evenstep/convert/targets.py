"""What a converted script says: in evenstep's words, and in those of torch's own DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

_TORCH_JOIN = '''
def join_ranks():
    """Join the processes that torchrun started: a GPU and NCCL for each, or Gloo on the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
'''
_TORCH_SUM = '''
def sum_over_ranks(value):
    """Add a number up over all ranks; every rank calls this."""
    total = torch.as_tensor(value, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu").detach()
    dist.all_reduce(total)
    return int(total) if isinstance(value, int) else total.item()
'''
_TORCH_STREAM = '''
class OfThisRank(IterableDataset):
    """Every rank's own records of a stream; the last few, of which not all ranks would get one, are left out."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        parts = [iter(self.stream)] * dist.get_world_size()
        return (group[dist.get_rank()] for group in zip(*parts))
'''


@dataclass(frozen=True)
class Target:
    """The words of one way to train on several ranks.

    Attributes:
        name: "evenstep" or "torch".
        main: The condition that holds on rank 0.
        wrapper: The class that averages gradients.
        mean: A mean over ranks; {old} is this rank's, {weight} what that was averaged over.
        total: A sum over ranks.
        launch: The command that starts two ranks.
        imports: Lines that are needed, by where they go: "first" or "torch".
        helpers: Functions that are put behind the imports, by name.
    """

    name: str
    main: str
    wrapper: str
    mean: str
    total: str
    launch: str
    imports: tuple[tuple[str, str], ...]
    helpers: tuple[tuple[str, str], ...] = ()


def evenstep(world: str) -> Target:
    """The words of evenstep; `world` is what the script calls the ranks."""
    return Target(
        name="evenstep",
        main=f"{world}.is_main",
        wrapper="evenstep.DistributedDataParallel",
        mean=f"{world}.mean({{old}}, weight={{weight}})",
        total=f"sum({world}.exchange({{old}}))",
        launch="evenstep run --nproc-per-node 2 {script}",
        imports=(("import evenstep", "torch"),),
    )


def torch() -> Target:
    """The words of torch's own classes."""
    return Target(
        name="torch",
        main="dist.get_rank() == 0",
        wrapper="DistributedDataParallel",
        mean="(sum_over_ranks({old}) / dist.get_world_size())",
        total="sum_over_ranks({old})",
        launch="torchrun --nproc-per-node 2 {script}",
        imports=(
            ("import os", "first"),
            ("import torch", "torch"),
            ("import torch.distributed as dist", "torch"),
            ("from torch.nn.parallel import DistributedDataParallel", "torch"),
            ("from torch.utils.data.distributed import DistributedSampler", "torch"),
            ("from torch.utils.data import IterableDataset", "torch"),
        ),
        helpers=(("join_ranks", _TORCH_JOIN), ("sum_over_ranks", _TORCH_SUM), ("OfThisRank", _TORCH_STREAM)),
    )
