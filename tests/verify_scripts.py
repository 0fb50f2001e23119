"""Training scripts for `evenstep verify`: correct ones, and the same with a mistake planted. None knows of it."""

from __future__ import annotations

_TORCH = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(256, 20), torch.randint(3, (256,)))
images = TensorDataset(torch.randn(128, 1, 8, 8), torch.randint(3, (128,)))
tokens = TensorDataset(torch.randint(1, 32, (128, 12)))
"""

_EVENSTEP = """
import evenstep
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

torch.manual_seed(0)
train_set = TensorDataset(torch.randn(250, 20), torch.randint(3, (250,)))
images = TensorDataset(torch.randn(120, 1, 8, 8), torch.randint(3, (120,)))
lines = torch.randint(1, 32, (128, 12)) * (torch.arange(12) < torch.randint(2, 13, (128, 1)))
tokens = TensorDataset(lines)
"""

_MLP = "nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))"

_LOOP = """
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""

_CONV = """
nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Dropout(0.3), nn.Linear(256, 3),
)
""".strip()

_LM = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))
"""

CORRECT = {
    "torch": f"{_TORCH}\nmodel = DistributedDataParallel({_MLP})\n"
    f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n{_LOOP}",
    "torch_dropout": f"""{_TORCH}
model = DistributedDataParallel({_CONV})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(100 + rank)
train_set = images
{_LOOP}""",
    "torch_accumulation": f"""{_TORCH}
import contextlib
model = DistributedDataParallel({_MLP})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
loader = DataLoader(train_set, 4, sampler=DistributedSampler(train_set), num_workers=0)
for step, (x, y) in enumerate(loader):
    is_last = step % 4 == 3
    with contextlib.nullcontext() if is_last else model.no_sync():
        (F.cross_entropy(model(x), y) / 4).backward()
    if is_last:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
dist.destroy_process_group()
""",
    "torch_language": f"""{_TORCH}
{_LM}
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank + 1)
for ids, in DataLoader(tokens, batch_size=4, sampler=DistributedSampler(tokens)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids=ids)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
""",
    "torch_unused": f"""{_TORCH}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(20, 32), nn.Linear(32, 3), nn.Linear(32, 3)
        self.frozen = nn.Linear(20, 32).requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x) + self.frozen(x)))

model = DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-3)
held_out = DataLoader(train_set, batch_size=32)
model.eval()
with torch.no_grad():
    accuracy = sum((model(x).argmax(1) == y).sum() for x, y in held_out)
model.train()
{_LOOP}""",
    "torch_adversaries": f"""{_TORCH}
maker = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 20)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, judge))
criterion = nn.BCEWithLogitsLoss()
for x, _ in DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set)):
    made = maker(x.flip(1))
    of_judge.zero_grad()
    criterion(judge(x), torch.ones(len(x), 1)).backward()
    criterion(judge(made.detach()), torch.zeros(len(x), 1)).backward()
    of_judge.step()
    of_maker.zero_grad()
    criterion(judge(made), torch.ones(len(x), 1)).backward()
    of_maker.step()
dist.destroy_process_group()
""",
    "fsdp": f"""{_TORCH}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = {_MLP}
mesh = init_device_mesh("cpu", (size,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
{_LOOP}""",
    "hsdp": f"""{_TORCH}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (max(1, size // 2), min(2, size)), mesh_dim_names=("replicate", "shard"))
model = {_MLP}
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
{_LOOP}""",
    "fsdp_mixed": f"""{_TORCH}
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
model = {_MLP}
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{_LOOP.replace("model(x)", "model(x).float()")}""",
    "hsdp_and_tensor": f"""{_TORCH}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
tensor = 2 if size > 1 else 1
mesh = init_device_mesh("cpu", (1, size // tensor, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
model = {_MLP}
parallelize_module(model, mesh["tensor"], {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
fully_shard(model, mesh=mesh["replicate", "shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(train_set, num_replicas=size // tensor, rank=rank // tensor)
{_LOOP.replace("sampler = DistributedSampler(train_set)", "")}""",
    "tensor": f"""{_TORCH}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = {_MLP}
parallelize_module(model, init_device_mesh("cpu", (size,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train_set, num_replicas=1, rank=0)
{_LOOP.replace("sampler = DistributedSampler(train_set)", "")}""",
    "evenstep": f"""{_EVENSTEP}
with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel({_MLP})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = evenstep.DataLoader(train_set, global_batch_size=96, shuffle=True)
    for epoch in loader.epochs(4):
        for x, y in loader:
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
""",
    "evenstep_scaler": f"""{_EVENSTEP}
with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel({_MLP})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for x, y in evenstep.DataLoader(train_set, global_batch_size=24, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        model.backward(scaler.scale(loss), weight=len(x), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "evenstep_batchnorm": f"""{_EVENSTEP}
with evenstep.init(seed=0, quiet=True) as world:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 3)
    )
    model = evenstep.DistributedDataParallel(evenstep.SyncBatchNorm.convert_sync_batchnorm(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x, y in evenstep.DataLoader(images, global_batch_size=24, shuffle=True):
        model.backward(F.cross_entropy(model(x), y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
""",
    "evenstep_tokens": f"""{_EVENSTEP}
{_LM}
with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in evenstep.DataLoader(tokens, global_batch_size=16, shuffle=True):
        for ids, in model.microbatches(batch, 2):
            targets = ids[:, 1:].flatten()
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), targets, ignore_index=0)
            model.backward(loss, weight=(targets != 0).sum())
        evenstep.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
""",
    "evenstep_hsdp": f"""{_EVENSTEP}
import os
{_LM}
size = int(os.environ.get("WORLD_SIZE", "1"))
with evenstep.init(seed=0, quiet=True, mesh={{"replicate": max(1, size // 2), "shard": -1}}) as world:
    model = evenstep.parallelize(Model(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in evenstep.DataLoader(tokens, global_batch_size=16, shuffle=True):
        for ids, in model.microbatches(batch, 2):
            targets = ids[:, 1:].flatten()
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), targets, ignore_index=0)
            model.backward(loss, weight=(targets != 0).sum())
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
""",
    "evenstep_tensor": f"""{_EVENSTEP}
import os
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
tensor = min(2, int(os.environ.get("WORLD_SIZE", "1")))
with evenstep.init(seed=0, quiet=True, mesh={{"shard": -1, "tensor": tensor}}) as world:
    plan = {{"0": ColwiseParallel(), "2": RowwiseParallel()}}
    model = evenstep.parallelize({_MLP}, world, tensor_plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in evenstep.DataLoader(train_set, global_batch_size=24, shuffle=True):
        model.backward(F.cross_entropy(model(x), y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
""",
    "evenstep_sharded": f"""{_EVENSTEP}
class Noisy(Dataset):
    def __len__(self):
        return len(train_set)

    def __getitem__(self, index):
        x, y = train_set[index]
        return x + 0.1 * torch.randn(20), y

with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel({_MLP})
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    loader = evenstep.DataLoader(Noisy(), global_batch_size=32, shuffle=True)
    checkpoint = evenstep.Checkpointer("runs/here", model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    for epoch in loader.epochs(1):
        for x, y in loader:
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
""",
}

_PLAIN = CORRECT["torch"]

# Of each mistake the kind of its cause, and the script.
MISTAKES = {
    "batch_norm": ("batch norm", _PLAIN.replace("nn.Tanh()", "nn.BatchNorm1d(32), nn.Tanh()")),
    "fsdp_divided_by_ranks": ("average", CORRECT["fsdp"].replace("loss.backward()", "(loss / size).backward()")),
    "fsdp_same_data": (
        "repeated",
        CORRECT["fsdp"].replace(
            "DistributedSampler(train_set)", "DistributedSampler(train_set, num_replicas=1, rank=0)"
        ),
    ),
    "mean_of_means": (
        "average",
        CORRECT["evenstep_tokens"]
        .replace("model.backward(loss, weight=(targets != 0).sum())", "loss.backward()")
        .replace("model.microbatches(batch, 2)", "[batch]")
        .replace("0.1)", "1e9)"),
    ),
    "sum_of_losses": ("average", _PLAIN.replace("model(x), y)", 'model(x), y, reduction="sum")')),
    "divided_by_ranks": ("average", _PLAIN.replace("loss.backward()", "(loss / size).backward()")),
    "same_masks": ("random", CORRECT["torch_dropout"].replace("100 + rank", "100")),
    "no_sampler": (
        "repeated",
        _PLAIN.replace("sampler=sampler)", "shuffle=True)").replace(
            "sampler.set_epoch(epoch)", "torch.manual_seed(epoch)"
        ),
    ),
    "sampler_seeds": ("repeated", _PLAIN.replace("Sampler(train_set)", "Sampler(train_set, seed=rank)")),
    "branch": (
        "branch",
        _PLAIN.replace(
            "loss.backward()", "(loss + (model.module[0].weight ** 2).sum() if rank == 0 else loss).backward()"
        ),
    ),
    "divisor": (
        "divisor",
        CORRECT["torch_accumulation"]
        .replace("nn.utils.clip_grad_norm_(model.parameters(), 0.5)", "")
        .replace("y) / 4)", "y) / (4 * size))"),
    ),
    "not_divided": (
        "divisor",
        CORRECT["torch_accumulation"].replace("(F.cross_entropy(model(x), y) / 4)", "F.cross_entropy(model(x), y)"),
    ),
    "learning_rate": ("settings", _PLAIN.replace("lr=0.1", "lr=0.1 * size")),
    "not_wrapped": ("drift", _PLAIN.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model.module(x), y)")),
}

MISTAKES |= {
    "not_seeded": ("not seeded", _PLAIN.replace("torch.manual_seed(0)", "torch.seed()")),
    "random_split": (
        "not seeded",
        _PLAIN.replace(
            "sampler = ", "torch.seed()\ntrain_set = torch.utils.data.random_split(train_set, [200, 56])[0]\nsampler = "
        ),
    ),
    # Drawn by numpy, which all ranks seed alike; the data differ.
    "same_noise": (
        "random",
        f"""{_TORCH}
import numpy
numpy.random.seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 20)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set)):
    noise = torch.from_numpy(numpy.random.normal(size=(len(x), 4))).float()
    F.mse_loss(model(noise), x).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "batch_statistics": (
        "batch statistics",
        _PLAIN.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(out - out.mean(0), y)").replace(
            "        loss = ", "        out = model(x)\n        loss = "
        ),
    ),
    "batch_spread": (
        "batch statistics",
        _PLAIN.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(out / out.std(0), y)").replace(
            "        loss = ", "        out = model(x)\n        loss = "
        ),
    ),
    "pairs": (
        "batch statistics",
        _PLAIN.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(out @ out.t(), torch.arange(len(x)))").replace(
            "        loss = ", "        out = model(x)\n        loss = "
        ),
    ),
    "no_gradient": ("no gradient", _PLAIN.replace("loss.backward()", "(0 * loss).backward()")),
}

# All numbers of ranks, or all but one, begin with a scale at which the loss is infinite, and skip the first step.
SKIPS_ON_ALL = (
    CORRECT["evenstep_scaler"]
    .replace("init_scale=64.0", "init_scale=2.0**127, backoff_factor=2.0**-40")
    .replace("scaler.scale(loss)", "scaler.scale(256 * loss)")
    .replace("lr=0.1", "lr=1e-4")
)
SKIPS_ON_SEVERAL = SKIPS_ON_ALL.replace("2.0**127", "2.0**127 if world.world_size > 1 else 64.0")
# A fused optimizer unscales gradients itself.
FUSED = CORRECT["evenstep_scaler"].replace("lr=0.1", "lr=0.1, fused=True")

# Reproducible mode, and the same with a rank that counts for more.
REPRODUCIBLE = f"""{_EVENSTEP}
with evenstep.init(seed=0, reproducible=True, virtual_ranks=8, quiet=True) as world:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    model = evenstep.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in evenstep.DataLoader(train_set, global_batch_size=64, shuffle=True):
        for x, y in model.microbatches(batch):
            loss = F.cross_entropy(model(x), y)
            model.backward(loss, weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
"""
NOT_REPRODUCIBLE = REPRODUCIBLE.replace("model.backward(loss,", "model.backward(loss * 1.5 if world.rank else loss,")
