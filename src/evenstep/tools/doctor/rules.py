"""The rules of `evenstep doctor`: what each finds, why it matters and how it is mended. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GROUPS = {  # the digit after EV, and the page in docs/reference/doctor
    "data": "1",
    "output": "2",
    "devices": "3",
    "collectives": "4",
    "step": "5",
    "starting": "6",
}


class FoundBy(Enum):
    """How a rule's findings come to be."""

    READING = "reading"  # the text of the script decides
    RUNNING = "running"  # only a run shows it
    BOTH = "reading, confirmed by running"  # a run confirms or refutes what was read, and may find what wasn't


class Severity(Enum):
    """How bad it is. Values are those of SARIF's `level`."""

    ERROR = "error"  # a wrong result, a hang or a crash
    WARNING = "warning"  # time, memory or order is lost
    NOTE = "note"  # something to know; does not change the exit status


@dataclass(frozen=True)
class Rule:
    """One mistake that `doctor` knows.

    Attributes:
        id: "EV" and three digits, the first of its group; never used again for another mistake.
        name: In a few words, for tables.
        group: A key of `GROUPS`.
        what: One sentence: what the script does.
        why: One sentence or two: what comes of it.
        mend: A few lines of code, with names as most scripts have them.
        found_by: Reading, running, or both.
        severity: How bad it is.
    """

    id: str
    name: str
    group: str
    what: str
    why: str
    mend: str
    found_by: FoundBy
    severity: Severity

    def __post_init__(self) -> None:
        assert self.id.startswith(f"EV{GROUPS[self.group]}"), self.id

    @property
    def page(self) -> str:
        """Where the documentation describes it."""
        return f"docs/reference/doctor/{self.group}.md#{self.id.lower()}"


_READING, _RUNNING, _BOTH = FoundBy.READING, FoundBy.RUNNING, FoundBy.BOTH
_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_ALL = [
    # --- data ---
    Rule(
        "EV101",
        "no distributed sampler",
        "data",
        "A loader of training data has no distributed sampler, so every rank loads the whole data set.",
        "All ranks train on the same samples: an epoch costs as many epochs as there are ranks.",
        "sampler = DistributedSampler(train_set, shuffle=True)\n"
        "loader = DataLoader(train_set, batch_size=64, sampler=sampler)",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV102",
        "set_epoch never called",
        "data",
        "A DistributedSampler that shuffles is never told the epoch.",
        "Every epoch has the same order, so batches are made of the same samples each time.",
        "for epoch in range(num_epochs):\n    sampler.set_epoch(epoch)",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV104",
        "global and local batch size confused",
        "data",
        "A batch size meant for all ranks together is used by each of them, or the reverse.",
        "The real batch is larger or smaller than meant by the number of ranks, and the learning rate doesn't fit it.",
        "loader = DataLoader(train_set, batch_size=global_batch_size // world_size, sampler=sampler)",
        _READING,
        _ERROR,
    ),
    Rule(
        "EV105",
        "padded samples counted in validation",
        "data",
        "Validation is divided by a DistributedSampler, which repeats samples until ranks have the same number.",
        "Repeated samples count twice, so the metric depends on the number of ranks.",
        "indices = range(rank, len(val_set), world_size)\n"
        "val_loader = DataLoader(Subset(val_set, indices), batch_size=64)\n"
        "# all_reduce the sums, and the number of samples beside them",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV106",
        "stream read whole by every rank",
        "data",
        "An IterableDataset doesn't look at the rank, so every rank reads all of it.",
        "All ranks train on the same samples. A sampler can't help: torch refuses one for a stream.",
        "def __iter__(self):\n    yield from itertools.islice(self.read(), self.rank, None, self.world_size)",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV107",
        "same random augmentation on all ranks",
        "data",
        "All ranks have the same random state, so their augmentations and dropout masks are the same.",
        "The gradient averages over fewer random draws than there are samples.",
        "torch.manual_seed(seed + rank)  # after the model is built, or before: DDP makes replicas equal",
        _RUNNING,
        _WARNING,
    ),
    Rule(
        "EV108",
        "workers draw the same random numbers",
        "data",
        "Loader workers begin with the same random state: a constant seed, or a generator that each of them copied.",
        "Samples of different workers have the same augmentation, in every batch.",
        "def seed_worker(worker_id):\n    np.random.seed(torch.initial_seed() % 2**32)",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV109",
        "ranks with different numbers of batches",
        "data",
        "Ranks have different numbers of batches in an epoch.",
        "The rank with the most waits for the others in a collective that they never call: the run hangs.",
        "sampler = DistributedSampler(train_set)  # the same number on every rank\n"
        "# or, for a stream: with Join([model]): ...",
        _RUNNING,
        _ERROR,
    ),
    Rule(
        "EV110",
        "data split differently on each rank",
        "data",
        "A random split into training and validation is made without a seed, so each rank has a split of its own.",
        "Samples that one rank validates on are trained on by others: the validation says too much good.",
        "parts = random_split(data, lengths, generator=torch.Generator().manual_seed(0))",
        _READING,
        _ERROR,
    ),
    # --- output ---
    Rule(
        "EV201",
        "all ranks print or log",
        "output",
        "Every rank prints or logs the same lines.",
        "The output has every line as often as there are ranks, mixed, and none says whose it is.",
        "if rank == 0:\n    print(...)",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV202",
        "all ranks draw a progress bar",
        "output",
        "Every rank draws a progress bar.",
        "Bars of several processes overwrite each other on one terminal.",
        "for batch in tqdm(loader, disable=rank != 0):",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV203",
        "all ranks start a tracker",
        "output",
        "Every rank opens a run of an experiment tracker, or a writer of event files.",
        "The tracker shows one run per rank, and several processes write event files of the same directory.",
        "writer = SummaryWriter(log_dir) if rank == 0 else None",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV204",
        "all ranks save the checkpoint",
        "output",
        "Every rank saves the same checkpoint to the same file.",
        "Writes of several processes mix: the file may be unreadable, and nobody notices before it is needed.",
        "if rank == 0:\n    torch.save(state, path)\ndist.barrier()  # before anybody reads it",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV205",
        "two ranks write one file",
        "output",
        "Every rank writes the same file.",
        "Lines are lost or mixed, and the last rank decides what the file holds.",
        "if rank == 0:\n    with open(path, 'w') as file: ...",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV206",
        "checkpoint of the wrapper",
        "output",
        "The state_dict of the wrapper is saved instead of the model's own.",
        "Every name in the file begins with `module.`, and a model without the wrapper can't load it.",
        "torch.save(model.module.state_dict(), path)",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV207",
        "checkpoint lacks what resuming needs",
        "output",
        "A checkpoint that is resumed from has the model and the optimizer, but not all that a step depends on.",
        "A resumed run has another learning rate, loss scale or position than the one that was interrupted.",
        "state = {\n    'model': model.module.state_dict(),\n    'optimizer': optimizer.state_dict(),\n"
        "    'scheduler': scheduler.state_dict(),\n    'scaler': scaler.state_dict(),\n    'epoch': epoch + 1,\n}",
        _READING,
        _WARNING,
    ),
    # --- devices ---
    Rule(
        "EV301",
        "no set_device",
        "devices",
        "The script moves tensors to `cuda` without saying which, and never calls torch.cuda.set_device.",
        "All ranks of a host use GPU 0: it runs out of memory, or NCCL refuses two ranks on one device.",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV302",
        "cuda:0 on all ranks",
        "devices",
        "A fixed GPU is named, which every rank then uses.",
        "All ranks of a host share one GPU, or tensors of a rank lie on two devices.",
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV303",
        "tensors travel by way of the host",
        "devices",
        "A tensor goes from GPU to GPU through the host's memory: `.cpu()` and back, or as a pickled object.",
        "Each copy waits for the device and crosses the bus twice, where NCCL would send it directly.",
        "dist.all_gather_into_tensor(gathered, tensor)  # stays on the GPUs",
        _READING,
        _WARNING,
    ),
    Rule(
        "EV304",
        "pin_memory without non_blocking, or the reverse",
        "devices",
        "Of pinned memory and non-blocking copies the script has one, which has no effect without the other.",
        "Each copy of a batch to the GPU waits, instead of running beside the computation.",
        "loader = DataLoader(train_set, pin_memory=True)\nx = x.to(device, non_blocking=True)",
        _READING,
        _NOTE,
    ),
    Rule(
        "EV305",
        "the host waits for the device in every step",
        "devices",
        "A value is read from the GPU in every step: .item(), .cpu(), float(loss), print(loss).",
        "The host can't run ahead of the device, so the device idles while the next step is prepared.",
        "total_loss += loss.detach()  # on the device\nif step % 100 == 0:\n    print(total_loss.item() / 100)",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV306",
        "global rank as device",
        "devices",
        "The GPU of a rank is chosen by its global rank.",
        "On the second node ranks begin at 8, say, and there is no GPU 8: the run fails, there and only there.",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        _READING,
        _WARNING,
    ),
    # --- collectives ---
    Rule(
        "EV401",
        "collective on some ranks only",
        "collectives",
        "A collective is called where only some ranks come by.",
        "These ranks wait for the others, which never call it: the run hangs until a time-out.",
        "dist.all_reduce(total)  # every rank\nif rank == 0:\n    print(total.item())",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV402",
        "different numbers of collectives",
        "collectives",
        "Ranks call different numbers of collectives, or in another order.",
        "A rank waits for a call that never comes, or ranks combine tensors that have nothing to do with each other.",
        "# call the same collectives on every rank, also where a rank has nothing to add",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV403",
        "barrier in the step",
        "collectives",
        "A barrier is called in every step.",
        "All ranks wait for the slowest in each step, and communication can't overlap with computing.",
        "# leave it out: the gradients' all-reduce already keeps ranks together",
        _READING,
        _WARNING,
    ),
    Rule(
        "EV404",
        "wrapped model called on rank 0 only",
        "collectives",
        "The wrapped model is called where only some ranks come by.",
        "Its forward pass may broadcast buffers, its backward pass averages gradients: the run hangs.",
        "if rank == 0:\n    output = model.module(x)  # the model itself: no communication",
        _BOTH,
        _ERROR,
    ),
    # --- step ---
    Rule(
        "EV501",
        "accumulation without no_sync",
        "step",
        "Gradients are accumulated over several backward passes, and each of them averages over ranks.",
        "The exchange runs as often as there are micro-batches, where once per step is enough.",
        "with model.no_sync() if not last_microbatch else nullcontext():\n    loss.backward()",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV502",
        "wrong divisor",
        "step",
        "The loss is divided by another number than that of the backward passes of a step, or by the world size.",
        "The gradient is too large or too small by a factor, as if the learning rate were another.",
        "loss = loss / accumulation_steps  # DDP divides by the number of ranks itself",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV503",
        "clipping before unscale_",
        "step",
        "Gradients are clipped while they are multiplied by the loss scale.",
        "The norm is too large by the scale, so that every step is clipped to almost nothing.",
        "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)",
        _READING,
        _ERROR,
    ),
    Rule(
        "EV504",
        "optimizer of replaced parameters",
        "step",
        "The optimizer is built from parameters that the model replaces afterwards.",
        "The optimizer steps tensors that the model no longer has: the new parameters never change.",
        "model.head = nn.Linear(512, 10)\noptimizer = torch.optim.AdamW(model.parameters())  # after all changes",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV505",
        "mean over different numbers of tokens",
        "step",
        "Each rank averages its loss over its own number of tokens, and DDP averages the ranks equally.",
        "Tokens of a rank that has few of them count more: the gradient is not that of the global mean.",
        "num_tokens = mask.sum()\ndist.all_reduce(num_tokens)\nloss = (losses * mask).sum() * world_size / num_tokens",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV506",
        "learning rate of the smaller batch",
        "step",
        "The global batch grows with the number of ranks, and the learning rate of SGD does not.",
        "With SGD a larger batch usually wants a learning rate larger by as much, and a warm-up (torch's LinearLR).",
        "optimizer = SGD(model.parameters(), lr=base_lr * world_size)",
        _READING,
        _NOTE,
    ),
    Rule(
        "EV507",
        "batch norm over few rows",
        "step",
        "Batch normalisation takes its statistics from the few rows of one rank.",
        "Statistics of few rows are noise; replicas normalise differently, and accuracy falls as ranks are added.",
        "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # before it is wrapped",
        _BOTH,
        _WARNING,
    ),
    Rule(
        "EV509",
        "scheduler of another number of steps",
        "step",
        "The scheduler is made for the number of batches of all ranks together, and stepped once per local batch.",
        "The schedule ends at a fraction of its way: the learning rate never comes down.",
        "total_steps = num_epochs * len(loader)  # of this rank's loader, after it was sharded",
        _BOTH,
        _ERROR,
    ),
    Rule(
        "EV510",
        "forward pass around the wrapper",
        "step",
        "The loss that is trained on comes from model.module or one of its methods, and the wrapper is never called.",
        "Gradients aren't averaged: every rank trains a model of its own, and nothing says so.",
        "# class Model: forward(self, *args) is what calls compute_loss(...)\nloss = model(x, y)\nloss.backward()",
        _READING,
        _ERROR,
    ),
    Rule(
        "EV511",
        "backward pass around the loss scale",
        "step",
        "loss.backward() is called where accelerate or Fabric multiplies the loss by its scale in float16.",
        "The step divides by a scale that gradients never had: they are as good as zero.",
        "accelerator.backward(loss)",
        _READING,
        _ERROR,
    ),
    # --- starting ---
    Rule(
        "EV601",
        "fixed port",
        "starting",
        "The port of the rendezvous is written into the script.",
        "Two runs on one host collide, or join each other; the launcher's own port is overwritten.",
        "dist.init_process_group()  # reads MASTER_ADDR and MASTER_PORT, which the launcher has set",
        _READING,
        _WARNING,
    ),
    Rule(
        "EV603",
        "torch.distributed.launch",
        "starting",
        "The script is written for torch.distributed.launch, which passes --local_rank as an argument.",
        "torchrun and other launchers set LOCAL_RANK instead, so that every rank keeps the default, usually 0.",
        'local_rank = int(os.environ["LOCAL_RANK"])  # torchrun --nproc-per-node 4 train.py',
        _READING,
        _NOTE,
    ),
    Rule(
        "EV604",
        "no destroy_process_group",
        "starting",
        "The process group is never destroyed.",
        "Ranks end while others still communicate: warnings, hangs at exit, and leaked resources.",
        "dist.destroy_process_group()  # as the last thing, in a finally",
        _BOTH,
        _NOTE,
    ),
    Rule(
        "EV605",
        "DataParallel",
        "starting",
        "The model is wrapped by torch.nn.DataParallel.",
        "One process drives all GPUs: it copies the model in every forward pass and shares one interpreter lock.",
        "model = DistributedDataParallel(model, device_ids=[local_rank])  # one process per GPU",
        _READING,
        _WARNING,
    ),
    Rule(
        "EV606",
        "gradients not averaged",
        "starting",
        "Ranks join a process group, and nothing exchanges gradients: no wrapper, no collective in the loop.",
        "Every rank trains a model of its own on its part of the data, and nothing says so.",
        "model = DistributedDataParallel(model)",
        _READING,
        _ERROR,
    ),
]

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}
