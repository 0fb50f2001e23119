"""Which modules become blocks, and whether a tensor plan fits."""

from __future__ import annotations

import pytest
from torch import nn

from evenstep.errors import ConfigurationError
from evenstep.parallel.blocks import choose_blocks, validate_plan


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer(4), Layer(4)])
        self.act = nn.GELU()
        self.head = nn.Linear(4, 10)


def names(model, blocks):
    by_id = {id(each): name for name, each in model.named_modules()}
    return [by_id[id(each)] for each in choose_blocks(model, blocks)]


def test_every_kind_of_policy_chooses_inner_modules_first():
    model = Model()
    layers = ["layers.1", "layers.0"]
    assert names(model, None) == layers
    assert names(model, "Layer") == names(model, Layer) == names(model, [Layer, "Layer"]) == layers
    assert names(model, ("Layer", nn.Embedding)) == [*layers, "embed"]
    both = names(model, ["Layer", "Linear"])
    assert set(both) == {"head", *layers, *(f"{each}.{part}" for each in layers for part in ("up", "down"))}
    assert both.index("layers.0.up") < both.index("layers.0")
    assert names(model, lambda name, module: name.endswith("head")) == ["head"]
    assert names(model, 70) == layers  # 76 parameters each; Linear has 40 or 36, head 50, embed 40
    assert set(names(model, 40)) == {"head", "embed", "layers.0.up", "layers.1.up"}
    assert names(model, 10**6) == names(nn.Linear(2, 2), None) == []
    assert "act" not in names(model, lambda name, module: True)


@pytest.mark.parametrize("blocks", [0, -1, True, 1.5, {"Layer": 1}, [3], nn.Linear(1, 1), int])
def test_what_is_no_policy_is_refused(blocks):
    with pytest.raises(ConfigurationError, match="parallelize: blocks"):
        choose_blocks(nn.Sequential(nn.Linear(1, 1)), blocks)


def test_a_plan_names_modules():
    model = Model()
    validate_plan(model, {"layers.*.up": 1, "head": 1, "": 1})
    validate_plan(model, object())
    for wrong in ("layers.up", "layer.*.up", "layers.*.u", "layers.*.up.weight"):
        with pytest.raises(ConfigurationError, match="but the model has no such module"):
            validate_plan(model, {wrong: 1})
    with pytest.raises(ConfigurationError, match=r"Is 'layers.0.up' meant\?"):
        validate_plan(model, {"blocks.*.up": 1})
    with pytest.raises(ConfigurationError, match="a name in tensor_plan"):
        validate_plan(model, {0: 1})
