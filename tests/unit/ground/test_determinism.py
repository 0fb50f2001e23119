"""`determinism`: its switches, and that they are put back."""

from __future__ import annotations

import pytest
import torch

from evenstep.ground.computing import determinism


def switches() -> dict[str, object]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "cudnn": (cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32),
        "matmul": (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("is_frozen", [False, True])
def test_every_switch_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch, is_frozen: bool) -> None:
    """Whoever imports `torch.testing._internal.common_utils` may no longer assign torch's switches."""
    if is_frozen:
        of_module = torch.backends.flags_frozen.__globals__
        monkeypatch.setitem(of_module, "__allow_nonbracketed_mutation_flag", False)
        assert torch.backends.flags_frozen()
    before = switches()
    put_back = determinism.switch_on(torch.device("cpu"), threads=1)
    try:
        during = switches()
    finally:
        put_back()
    assert switches() == before
    assert during == {
        "cudnn": (True, True, False, False),
        "matmul": (False, False),
        "algorithms": True,
        "precision": "highest",
        "threads": 1,
    }
