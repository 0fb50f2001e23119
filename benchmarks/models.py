"""The five models that training steps are measured on, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Case:
    """A model to be trained.

    Attributes:
        build: Makes the model.
        draw: Makes a batch: inputs and targets.
        loss: Of outputs and targets, one number.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def tiny_mlp() -> nn.Module:
    """1,500 parameters in 6 tensors: nothing but overhead."""
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def thin_layers() -> nn.Module:
    """100 layers, 400 small tensors: what a hook per parameter costs."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(100)))


def wide_mlp() -> nn.Module:
    """6.3 million parameters in 4 tensors: bytes that travel."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 2048))


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels_in, h, w] to [n, channels, h / stride, w / stride]."""
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.around(x))


def small_resnet() -> nn.Module:
    """0.7 million parameters, with batch normalisation and so with module buffers."""
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 128, 2)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class GPT(nn.Module):
    """A causal transformer of 5 million parameters over 512 symbols."""

    def __init__(self, width: int = 256, depth: int = 6, length: int = 64, symbols: int = 512) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """[n, length] to [n, length, symbols]."""
        x = self.symbols(symbols) + self.places.weight[: symbols.shape[1]]
        return self.head(self.norm(self.layers(x, mask=self.mask, is_causal=True)))


def shard_parts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have torch's FSDP2 shard each of a module's parts by itself (for the GPT its layers), then the rest."""
    from torch.distributed.fsdp import fully_shard

    parts = next((list(each) for each in module.modules() if isinstance(each, nn.ModuleList)), None)
    for each in [*(module.children() if parts is None else parts), module]:
        if any(True for _ in each.parameters()):
            fully_shard(each, mesh=mesh)


def _regression(*shape: int, outputs: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(*shape), torch.randn(shape[0], outputs))


CASES: dict[str, Case] = {
    "tiny MLP": Case(tiny_mlp, _regression(16, 10, outputs=2), F.mse_loss),
    "100 thin layers": Case(thin_layers, _regression(16, 16, outputs=16), F.mse_loss),
    "wide MLP": Case(wide_mlp, _regression(64, 1024, outputs=2048), F.mse_loss),
    "small ResNet": Case(small_resnet, lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), F.cross_entropy),
    "GPT": Case(
        GPT,
        lambda: (torch.randint(512, (4, 64)), torch.randint(512, (4, 64))),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    ),
}
