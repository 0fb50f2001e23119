"""Private parts of autograd (torch 2.11 and later). Plain names are torch's own functions, so calls cost no more."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward

graph_task_id = torch._C._current_graph_task_id
will_execute = torch._C._will_engine_execute_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
set_grad_enabled = torch._C._set_grad_enabled
without_torch_function = torch._C.DisableTorchFunction
DeviceType = torch._C._autograd.DeviceType


def outside_inference_mode() -> AbstractContextManager[None]:
    """Context in which new tensors are normal tensors, which can be written to outside of torch's inference mode.

    Does nothing if inference mode is off. Its guard restores the state of gradients when the guard is freed. If a
    signal handler raises while the guard is made, the guard is freed only with the traceback, and gradients may have
    been switched on by then.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def enclosing_node() -> Node | None:
    """The node whose backward started the running pass, as with reentrant checkpointing; None: there is no such node.

    For nested passes, the node in the outermost pass. Reads the stack.
    """
    found, is_within, frame = None, False, inspect.currentframe()
    while frame is not None:
        if is_within and frame.f_code is BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        is_within |= frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return found


def has_pending_graph(tensor: torch.Tensor) -> bool:
    """Whether a backward pass through a tensor is still possible: it has a graph, which no pass has freed.

    The first node that saved a tensor shows this, by attributes that torch's page on the mechanics of autograd
    describes.
    """
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            try:
                if name.lstrip("_").startswith("saved_") and isinstance(getattr(node, name), torch.Tensor):
                    return True
            except RuntimeError:  # the saved tensor was freed
                return False
        nodes += [each for each, _ in node.next_functions if each is not None] if node is not None else []
    return False
