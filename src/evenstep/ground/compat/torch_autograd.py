"""Private parts of autograd (torch 2.11 and later). Names are torch's functions themselves: calls cost no more."""

from __future__ import annotations

import torch

graph_task_id = torch._C._current_graph_task_id
will_execute = torch._C._will_engine_execute_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
set_grad_enabled = torch._C._set_grad_enabled
without_torch_function = torch._C.DisableTorchFunction
DeviceType = torch._C._autograd.DeviceType
