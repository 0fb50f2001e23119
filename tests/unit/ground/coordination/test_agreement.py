"""The first difference between two models is found and said."""

from __future__ import annotations

from torch import nn

from evenstep.replica.wrapper.model_check import check_same_model, describe


def descriptions(*models):
    return [describe(model.named_parameters()) for model in models]


def test_equal_models_have_no_difference():
    assert check_same_model(descriptions(nn.Linear(2, 3), nn.Linear(2, 3))) is None


def test_a_shape_is_named_with_its_parameter_and_rank():
    finding = check_same_model(descriptions(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(4, 3)))
    assert finding == "parameter 'weight' has shape [3, 2] on rank 0 but [3, 4] on rank 2."


def test_a_dtype_is_named():
    finding = check_same_model(descriptions(nn.Linear(2, 3), nn.Linear(2, 3).double()))
    assert finding == "parameter 'weight' has dtype float32 on rank 0 but float64 on rank 1."


def test_a_missing_parameter_is_named():
    finding = check_same_model(descriptions(nn.Linear(2, 3), nn.Linear(2, 3, bias=False)))
    assert finding == ("rank 0 has 2 parameters, rank 1 has 1; the first that only rank 0 has is 'bias' [3].")


def test_another_order_of_equal_shapes_is_not_overlooked():
    a, b = nn.Module(), nn.Module()
    a.one, a.two = nn.Linear(2, 2), nn.Linear(2, 2)
    b.two, b.one = nn.Linear(2, 2), nn.Linear(2, 2)
    finding = check_same_model(descriptions(a, b))
    assert finding == (
        "parameter 0 is 'one.weight' on rank 0 but 'two.weight' on rank 1 (registered in another order)."
    )


def test_what_is_trained_must_agree():
    frozen = nn.Linear(2, 3)
    frozen.weight.requires_grad_(False)
    finding = check_same_model(descriptions(nn.Linear(2, 3), frozen))
    assert finding == "parameter 'weight' has requires_grad True on rank 0 but False on rank 1."
