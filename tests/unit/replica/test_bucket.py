"""Buckets whose gradients are added in another dtype: what travels, and what comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.replica.gradients.buckets.bucket import Bucket, whole_memory
from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, plan_layout
from evenstep.transport.local import LocalTransport

SHAPES = ((300, 200), (7,), (5, 3), (2, 2, 3, 3))


def built(dtype: torch.dtype, added_in: torch.dtype) -> Bucket:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    names = [f"p{index}" for index in range(len(SHAPES))]
    specs = [
        ParameterSpec(name, tuple(p.shape), p.dtype, p.device, added_in=added_in)
        for name, p in zip(names, parameters, strict=True)
    ]
    (layout,) = plan_layout(specs, range(3, -1, -1), BucketPolicy()).buckets
    return Bucket(layout, parameters, names, LocalTransport(), whole_memory(layout, dtype, LocalTransport()))


@pytest.mark.parametrize(
    ("dtype", "added_in"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_gradients_are_cast_as_they_are_packed_and_back_as_they_are_shown(
    dtype: torch.dtype, added_in: torch.dtype
) -> None:
    bucket = built(dtype, added_in)
    for how, divide_by in (("new", 1.0), ("one is missing", 1.0), ("added to views", 1.0), ("new", 2.0)):
        for index, parameter in enumerate(bucket.parameters):
            if how == "added to views" and parameter.grad is not None:
                parameter.grad.add_(1)
            else:
                parameter.grad = torch.randn_like(parameter)
            if how == "one is missing" and index == 1:
                parameter.grad = None
        given = [None if p.grad is None else p.grad.clone() for p in bucket.parameters]
        bucket.pack(divide_by)
        assert bucket.is_full is (how != "one is missing")
        for sent, grad in zip(bucket.sent_views, given, strict=True):
            assert torch.equal(sent, torch.zeros_like(sent) if grad is None else grad.to(added_in) / divide_by)
        bucket.launch(None, 1.0)
        bucket.wait()
        bucket.publish(lambda index: True)
        bucket.unpack()
        for parameter, view, sent in zip(bucket.parameters, bucket.views, bucket.sent_views, strict=True):
            assert parameter.grad is view
            assert torch.equal(view, sent.to(dtype))
