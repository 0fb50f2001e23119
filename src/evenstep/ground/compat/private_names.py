"""The private names of torch that evenstep uses: whether this torch has them, and what depends on each.

They are used in the modules beside this one only, under public names. `import evenstep` looks for those without which
it can't go on, and tests/unit/ground/compat/test_private_names.py for all of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SEEN = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch in which the names were looked for, and found unless a row says otherwise."""
IMPORT = "evenstep can't be imported"
NOTHING = "nothing changes"


@dataclass(frozen=True)
class PrivateName:
    """A name that torch doesn't document.

    Args:
        where: "module:attributes"; with "~name" at the end, an attribute or variable that the function before it uses.
        what: What it is, or what it is for.
        without: What happens in a torch that doesn't have it.
        seen: The versions of torch that have it.
    """

    where: str
    what: str
    without: str = IMPORT
    seen: tuple[str, ...] = SEEN

    @property
    def name(self) -> str:
        """As a person writes it."""
        return self.where.replace(":", ".").replace("~", ": ")


_DDP = "torch.nn.parallel"
_C10D = "torch.distributed.distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = "torch.distributed:ProcessGroup"
_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server.local_elastic_agent:LocalElasticAgent"
_RENDEZVOUS = f"{_ELASTIC}.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler"
_LOADER = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
_NO_FSDP = "evenstep.attach and parallelize can't take what fully_shard has divided"
_NEW = ("2.13", "2.14", "2.15")
_GROUPS_FAIL = "no process group can be made"
_NO_RUN = "evenstep run can't start ranks"
_NO_RESTART = "evenstep run can't restart ranks"
_NO_SERVERS = "evenstep.parameter_server can't connect"

NAMES = (
    # torch_autograd
    PrivateName("torch._C:_current_graph_task_id", "the number of the running backward pass; -1: none runs"),
    PrivateName("torch._C:_will_engine_execute_node", "whether the running backward pass reaches a node"),
    PrivateName("torch._C:_autograd._get_current_graph_task_keep_graph", "whether the running pass keeps its graph"),
    PrivateName("torch.autograd:Variable._execution_engine.queue_callback", "calls back at the end of a backward pass"),
    PrivateName("torch._C:_set_grad_enabled", "the switch itself; torch.no_grad costs microseconds"),
    PrivateName("torch._C:_autograd.DeviceType", "kinds of devices in a profile: evenstep bench"),
    PrivateName("torch._C:DisableTorchFunction", "a context without __torch_function__: evenstep verify"),
    # torch_tensors
    PrivateName("torch._C:_has_storage", "false for tensors without memory of their own"),
    PrivateName("torch._C:_disabled_torch_dispatch_impl", "tells subclasses without hooks from others"),
    PrivateName("torch._C:_disabled_torch_function_impl", "makes a subclass without hooks"),
    PrivateName("torch:Tensor._make_wrapper_subclass", "makes a tensor without memory: sharded gradients"),
    PrivateName("torch._utils:_flatten_dense_tensors", "several tensors as one: module buffers"),
    PrivateName("torch._utils:_unflatten_dense_tensors", "one tensor as several: module buffers"),
    PrivateName("torch:_amp_foreach_non_finite_check_and_unscale_", "what a GradScaler calls: sharded gradients"),
    PrivateName("torch:UntypedStorage._free_weak_ref", "frees weak references when python ends"),
    PrivateName(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "how FSDP2 divides what tensor parallelism has divided",
        "an ImportError when a DTensor is saved",
    ),
    # torch_modules
    PrivateName("torch.nn.modules.batchnorm:_BatchNorm", "the base of all batch normalisations"),
    PrivateName("torch.nn.modules.batchnorm:_NormBase._load_from_state_dict", "how a normalisation loads its state"),
    PrivateName("torch.nn:Module._load_from_state_dict", "how a module loads its state"),
    PrivateName(
        "torch.nn:Module.__init__~_load_state_dict_pre_hooks",
        "hooks of a module's load_state_dict",
        "an AttributeError when a checkpoint is loaded",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:OptimizedModule.__init__~_orig_mod",
        "the module inside a compiled one",
        "compiled modules are saved under other names",
    ),
    # torch_pytree
    *(
        PrivateName(f"torch.utils._pytree:{name}", "nested containers of tensors")
        for name in ("tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten")
    ),
    # torch_data
    PrivateName("torch.utils.data._utils.fetch:_MapDatasetFetcher", "fetches a loader's batch: evenstep verify"),
    PrivateName(
        "torch.utils.data._utils.worker:_worker_info",
        "what get_worker_info returns",
        "a data set in a worker divides its stream twice",
    ),
    *(
        PrivateName(where, "how torch watches over a loader's workers", "torch's signal handler reports dead workers")
        for where in (
            f"{_LOADER}.__init__~_worker_pids_set",
            f"{_LOADER}._try_get_data",
            "torch._C:_remove_worker_pids",
        )
    ),
    PrivateName(
        f"{_LOADER}.__init__~_workers", "a loader's worker processes", "messages on dead workers don't name processes"
    ),
    PrivateName(f"{_LOADER}._shutdown_workers", "ends a loader's workers", "they end with the garbage collector"),
    # torch_ddp
    PrivateName("torch.distributed.algorithms.join:_JoinConfig", "what Join reads of its members"),
    PrivateName("torch._C:Future", "what communication hooks return"),
    PrivateName(
        f"{_DDP}:DistributedDataParallel._active_ddp_module",
        "the module that runs, for torch.compile",
        "graphs aren't split at buckets, so nothing overlaps",
    ),
    PrivateName(
        "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
        "the mesh that a mesh is a slice of",
        "an AttributeError with device_mesh",
    ),
    PrivateName(
        "torch.distributed.tensor.parallel.ddp:_pre_dp_module_transform",
        "local parts of DTensor parameters",
        "an ImportError with device_mesh and tensor parallelism",
    ),
    # torch_ddp: fully_shard
    *(
        PrivateName(where, what, _NO_FSDP)
        for where, what in (
            ("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "what fully_shard has made of a module"),
            (f"{_FSDP}._fsdp_state:FSDPState.__init__~_state_ctx", "the state that all sharded parts of a model share"),
            (f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback", "ends their backward pass"),
            (f"{_FSDP}._fsdp_param:FSDPParam.__init__~_module_info", "which module has a parameter"),
            (f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward", "adds their gradients over ranks"),
            (f"{_FSDP}._fsdp_param:FSDPParam.init_unsharded_param~_unsharded_param", "a parameter while it is whole"),
            ("torch.distributed.tensor:DTensor.to_local~_local_tensor", "what a rank has of a DTensor"),
        )
    ),
    *(
        # Until 2.14 an attribute that the constructor sets, then a property.
        PrivateName(
            f"{_FSDP}._fsdp_param:FSDPParam.{where}", "the gradient of a parameter while it is whole", _NO_FSDP, seen
        )
        for where, seen in (
            ("__init__~unsharded_accumulated_grad", SEEN[:-1]),
            ("unsharded_accumulated_grad", SEEN[-1:]),
        )
    ),
    *(
        # Until 2.12 an attribute of objects, for which one can't look in the class.
        PrivateName(f"{_FSDP}._fsdp_state:FSDPState.{where}", "parameters that travel as one", _NO_FSDP, _NEW)
        for where in ("_fsdp_param_group", "__init__~_fsdp_param_groups")
    ),
    # torch_distributed
    *(
        PrivateName(f"torch.distributed.rpc:{name}", "lets processes join and leave one by one", _NO_SERVERS)
        for name in ("api._get_current_rpc_agent", "TensorPipeAgent._update_group_membership")
    ),
    PrivateName(
        "torch.distributed.rendezvous:_create_c10d_store",
        "the store of env:// and tcp://",
        "torch's own groups meet at a port of loopback under evenstep run, too",
    ),
    PrivateName(f"{_C10D}:_get_default_store", "the store of the default group"),
    PrivateName(f"{_C10D}:_abort_process_group", "ends all groups without waiting"),
    PrivateName(
        "torch._C._distributed_c10d:HealthCheckHook",
        "tells a torch that visits the backends of a new group",
        "no process group can be made, if torch still visits them",
        seen=("2.15",),
    ),
    PrivateName(
        f"{_C10D}:_world.group_count", "how many groups torch has named", "an AttributeError after a failed rendezvous"
    ),
    PrivateName(
        f"{_C10D}:_world.pg_map", "the groups that torch has named", "a forked child may hang or crash at its end"
    ),
    PrivateName(f"{_GROUP}._set_sequence_number_for_group", "lets Gloo count its calls", NOTHING, SEEN[:3]),
    PrivateName(f"{_GROUP}._register_backend", "lets a backend carry some devices' tensors", _GROUPS_FAIL),
    PrivateName(f"{_GROUP}._set_default_backend", "lets a backend carry what has no device", _GROUPS_FAIL),
    *(
        PrivateName(f"torch.distributed:ProcessGroupGloo.{name}", "Gloo between ranks of one host", "no Gloo beside it")
        for name in ("_Options", "_Options._devices", "_Options._timeout", "create_device")
    ),
    *(
        PrivateName(where, "changes the deadline of Gloo's calls", "an AttributeError when a deadline is changed")
        for where in (f"{_GROUP}._get_backend", "torch.distributed:ProcessGroupGloo._set_default_timeout")
    ),
    *(
        PrivateName(where, "tensors outside torch.func's transforms", "an AttributeError in every collective")
        for where in (
            "torch._C._functorch:peek_interpreter_stack",
            "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        )
    ),
    # torch_dynamo
    PrivateName("torch._C._dynamo.eval_frame:_FrameAction.SKIP", "keeps torch.compile out of a function"),
    PrivateName("torch._C._dynamo.eval_frame:_FrameExecStrategy", "keeps torch.compile out of a function"),
    PrivateName("torch._C._dynamo.eval_frame:set_code_exec_strategy", "keeps torch.compile out of a function"),
    PrivateName("torch._compile:_disable_dynamo", "a graph break around a function"),
    PrivateName(
        "torch._dynamo.trace_rules:add",
        "keeps torch.compile out of a package",
        "an AttributeError with torch.compile",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:cached_backends",
        "whether anything was compiled",
        "an AttributeError as soon as an optimizer was made",
    ),
    PrivateName(
        "torch._dynamo.symbolic_convert:InliningInstructionTranslator.check_inlineable~_torchdynamo_disable",
        "marks a function that isn't traced",
        "torch.compile traces it, and recompiles more often",
    ),
    # torch_profiler
    PrivateName("torch.autograd.profiler:_is_profiler_enabled", "whether a profiler runs"),
    PrivateName("torch._C._profiler:_RecordFunctionFast", "an event of a profile, with tensors and details"),
    PrivateName("torch._ops:OpOverload.__init__~_overloadpacket", "what CommDebugMode counts an operation as"),
    PrivateName("torch._C:_len_torch_dispatch_stack", "whether a mode watches each operation"),
    PrivateName("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "the modes that do"),
    PrivateName(
        "torch.distributed.tensor.debug._comm_mode:CommDebugMode.__torch_dispatch__", "counts collectives", NOTHING
    ),
    # torch_elastic
    *(
        PrivateName(f"{_AGENT}.{name}", "a method of torchelastic's agent that ours extends", _NO_RUN)
        for name in (
            "_rendezvous",
            "_start_workers",
            "_monitor_workers",
            "_restart_workers",
            "_stop_workers",
            "__init__~_pcontext",
        )
    ),
    PrivateName(
        f"{_ELASTIC}.agent.server.api:SimpleElasticAgent.__init__~_remaining_restarts", "restarts left", _NO_RESTART
    ),
    PrivateName("torch.distributed.launcher.api:launch_agent~LocalElasticAgent", "the agent that is started", _NO_RUN),
    PrivateName(
        f"{_ELASTIC}.multiprocessing.api:get_subprocess_handler",
        "starts a rank's process",
        "ranks are new pythons, and start in seconds",
    ),
    PrivateName(f"{_ELASTIC}.multiprocessing.subprocess_handler:SubprocessHandler._popen", "starts a process", _NO_RUN),
    PrivateName(
        f"{_ELASTIC}.multiprocessing.api:_terminate_process_handler",
        "how torchelastic stops a run on a signal",
        "its handler isn't told from a script's own",
    ),
    *(
        PrivateName(where, "the store of a rendezvous", "a restart on several nodes meets in the old store")
        for where in (
            f"{_RENDEZVOUS}.__init__~_bootstrap_store_info",
            f"{_RENDEZVOUS}.__init__~_shared_tcp_store_server",
            f"{_RENDEZVOUS}._create_tcp_store_server",
        )
    ),
)


def is_there(name: PrivateName) -> bool:
    """Whether this torch has it. Imports the module that it is in: for parts of torch.compile, seconds."""
    module, _, rest = name.where.partition(":")
    attributes, _, used = rest.partition("~")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        code = inspect.unwrap(found).__code__ if used else None
    except (ImportError, AttributeError):
        return False
    return code is None or used in (*code.co_names, *code.co_consts)


def refuse_other_torch(names: Sequence[PrivateName] = NAMES) -> None:
    """Check the names that evenstep can't be imported without.

    Raises:
        ImportError: This torch lacks some: which they are, and which torch has them.
    """
    lacking = [name for name in names if name.without == IMPORT and not is_there(name)]
    if lacking:
        listed = "; ".join(f"{name.name} ({name.what})" for name in lacking)
        raise ImportError(
            f"torch {torch.__version__} lacks private names on which evenstep stands: {listed}. They were seen in "
            f"torch {', '.join(lacking[0].seen)}: install one of these, or a newer evenstep."
        )
