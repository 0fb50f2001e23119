"""The MNIST program: 28 x 28 images from IDX files, three linear layers, one process per replica.

    evenstep run --nproc-per-node 2 examples/textbook/mnist.py
    torchrun --nproc-per-node 2 examples/textbook/mnist.py --with torch

`--data` names a folder with MNIST's four files (with or without .gz). Files that aren't there are generated: digits
drawn with a wobbly pen, in the same format. Without `--data` they lie in a temporary folder.
"""

import argparse
import gzip
import itertools
import math
import os
import struct
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

# ---------------------------------------------------------------------- IDX files
# Two zero bytes, the type (8: unsigned byte), the number of dimensions; each dimension as a big-endian 32-bit
# number; then the values, the last dimension running fastest.


def read_idx(path, num_dimensions):
    """The array in an IDX file of unsigned bytes, as a uint8 tensor of `num_dimensions`."""
    path = Path(path)
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and packed.exists():
        data = gzip.decompress(packed.read_bytes())
    else:
        data = path.read_bytes()
    header_size = 4 + 4 * num_dimensions
    expected = struct.pack(">HBB", 0, 8, num_dimensions)
    if data[:4] != expected:
        raise ValueError(
            f"{path} is no IDX file of unsigned bytes in {num_dimensions} dimensions: "
            f"it begins with {data[:4].hex() or 'nothing'}, not with {expected.hex()}"
        )
    if len(data) < header_size:
        raise ValueError(f"{path} ends inside its header, after {len(data)} of {header_size} bytes")
    shape = struct.unpack(f">{num_dimensions}I", data[4:header_size])
    if len(data) - header_size != math.prod(shape):
        raise ValueError(
            f"{path} announces {' x '.join(map(str, shape))} values, which is {math.prod(shape)} bytes, "
            f"but {len(data) - header_size} follow: it is truncated or damaged"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[header_size:].reshape(shape)


def write_idx(path, array):
    """Write a uint8 tensor; the file appears whole or not at all."""
    header = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape)
    partial = Path(path).with_suffix(".partial")
    partial.write_bytes(header + array.numpy().tobytes())
    os.replace(partial, path)


def load(folder, part):
    """Images [n, 784], float32 around 0, and labels [n], int64."""
    images_name, labels_name = FILES[part]
    images = read_idx(folder / images_name, num_dimensions=3)
    labels = read_idx(folder / labels_name, num_dimensions=1)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{folder / images_name} holds images of {tuple(images.shape[1:])} pixels, not of 28 x 28")
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images but {len(labels)} labels in the {part} set")
    if len(labels) and labels.max() > 9:
        raise ValueError(f"{folder / labels_name}: a label of {int(labels.max())}; digits are 0 to 9")
    return TensorDataset((images.flatten(1).float() / 255 - 0.13) / 0.31, labels.long())


# ---------------------------------------------------------------------- a generated set

# Each digit as the pen draws it: strokes of points (x to the right, y downward, both 0 to 1).
STROKES = {
    0: [[(0.5, 0), (0.15, 0.2), (0.1, 0.7), (0.5, 1), (0.9, 0.7), (0.85, 0.2), (0.5, 0)]],
    1: [[(0.25, 0.25), (0.55, 0), (0.55, 1)]],
    2: [[(0.1, 0.25), (0.4, 0), (0.85, 0.15), (0.8, 0.45), (0.1, 1), (0.9, 1)]],
    3: [[(0.1, 0.1), (0.6, 0), (0.8, 0.25), (0.4, 0.45), (0.9, 0.7), (0.6, 1), (0.1, 0.9)]],
    4: [[(0.7, 1), (0.7, 0), (0.1, 0.65), (0.95, 0.65)]],
    5: [[(0.85, 0), (0.2, 0), (0.15, 0.45), (0.6, 0.4), (0.9, 0.7), (0.55, 1), (0.1, 0.9)]],
    6: [[(0.75, 0), (0.25, 0.4), (0.15, 0.8), (0.5, 1), (0.85, 0.8), (0.7, 0.5), (0.2, 0.6)]],
    7: [[(0.1, 0), (0.9, 0), (0.4, 1)], [(0.3, 0.5), (0.8, 0.5)]],
    8: [[(0.5, 0.45), (0.15, 0.2), (0.5, 0), (0.85, 0.2), (0.1, 0.75), (0.5, 1), (0.9, 0.75), (0.5, 0.45)]],
    9: [[(0.8, 0.45), (0.4, 0.55), (0.15, 0.25), (0.5, 0), (0.85, 0.2), (0.8, 0.6), (0.6, 1)]],
}


def draw(digit, count, generator):
    """`count` images of one digit: [count, 28, 28], uint8, each with a slant, size, place and pen of its own."""

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    segments = [pair for stroke in STROKES[digit] for pair in itertools.pairwise(stroke)]
    points = torch.tensor(segments) - 0.5  # [segments, 2 ends, 2 coordinates]
    points = points + 0.05 * torch.randn(count, *points.shape, generator=generator)
    angle, slant = uniform(-0.3, 0.3), uniform(-0.3, 0.3)
    width, height = uniform(9, 16), uniform(15, 21)
    turned_x = points[..., 0] * width[:, None, None] + points[..., 1] * (slant * height)[:, None, None]
    turned_y = points[..., 1] * height[:, None, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    place = uniform(12, 16, 1, 1, 2)
    ends = torch.stack([turned_x * cos - turned_y * sin, turned_x * sin + turned_y * cos], dim=-1) + place

    # The distance of every pixel to every segment, and ink where the nearest lies within the pen.
    pixels = torch.cartesian_prod(torch.arange(28.0), torch.arange(28.0)).flip(1)  # [784, (x, y)]
    start, along = ends[:, None, :, 0], (ends[:, :, 1] - ends[:, :, 0])[:, None]  # [count, 1, segments, 2]
    offset = pixels[None, :, None] - start
    fraction = ((offset * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)).clamp(0, 1)
    distance = (offset - fraction[..., None] * along).norm(dim=-1).amin(-1)  # [count, 784]
    ink = (uniform(1.6, 2.4, 1) - distance).clamp(0, 1) + 0.08 * torch.randn(count, 784, generator=generator)
    return (ink.clamp(0, 1) * 255).round().to(torch.uint8).reshape(count, 28, 28)


def generate(folder, part, per_digit, seed):
    """Write one part of the set; the same files for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.cat([draw(digit, per_digit, generator) for digit in range(10)])
    labels = torch.arange(10, dtype=torch.uint8).repeat_interleave(per_digit)
    order = torch.randperm(len(labels), generator=generator)
    images_name, labels_name = FILES[part]
    write_idx(folder / images_name, images[order])
    write_idx(folder / labels_name, labels[order])


def complete(folder):
    """Generate what isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, per_digit) in enumerate((("train", 400), ("test", 100))):
        if not all((folder / n).exists() or (folder / f"{n}.gz").exists() for n in FILES[part]):
            generate(folder, part, per_digit, seed)


# ---------------------------------------------------------------------- training


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def train(model, loader, optimizer, epoch):
    loader.sampler.set_epoch(epoch)
    total = torch.zeros(1)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def test(model, dataset):
    images, labels = dataset.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def run(folder, args):
    if args.classes == "torch":
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data.distributed import DistributedSampler
    else:
        from evenstep import DistributedDataParallel, DistributedSampler
    train_set, test_set = load(folder, "train"), load(folder, "test")
    sampler = DistributedSampler(train_set, shuffle=args.shuffle)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(args.epochs):
        loss = train(model, loader, optimizer, epoch)
        if dist.get_rank() == 0:
            accuracy = test(model.module, test_set)
            print(f"epoch {epoch}: loss {loss:.4f}, {accuracy:.1%} of the test set right", flush=True)
    if dist.get_rank() == 0:
        print(f"final loss: {loss:.4f}")


def main():
    parser = argparse.ArgumentParser(description="three linear layers on MNIST's files")
    parser.add_argument("--with", dest="classes", choices=["evenstep", "torch"], default="evenstep")
    parser.add_argument("--data", type=Path, help="folder of the IDX files, the same for all ranks")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per replica and step")
    parser.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="keep the order, which the two shuffle differently"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "mnist.py needs a launcher: evenstep run --nproc-per-node 2 examples/textbook/mnist.py\n")

    dist.init_process_group("gloo")
    try:
        if args.data is None:
            with tempfile.TemporaryDirectory() as folder:  # one for each rank: the same files, wherever it runs
                complete(Path(folder))
                run(Path(folder), args)
        else:
            if dist.get_rank() == 0:
                complete(args.data)
            dist.barrier()
            run(args.data, args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
