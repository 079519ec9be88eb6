"""The table of private names: where PyTorch has each, what needs it, and what does without it."""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import count
from math import nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

__all__: list[str] = []

#: The versions of PyTorch that the tests have run with.
TESTED = ("2.11", "2.13", "2.14", "2.15")


class Name(NamedTuple):
    """A private name of PyTorch.

    Args:
        path: the module, a colon, and the attribute in it, which may have dots.
        feature: what needs it, as messages call that.
        instead: what to use where PyTorch does not have it. Without this, using it is an error.
        question: whether it is a value that changes, which is read anew by each call.
    """

    path: str
    feature: str
    instead: Any = None
    question: bool = False


def _unseen(path: str, feature: str, answer: Any) -> Name:
    """A name that tells whether a feature is in use. Without it, the feature counts as unused."""

    def instead(*_: Any) -> Any:
        warnings.warn(
            f"{feature} cannot be seen with this PyTorch, and torchgpipe does as if there were "
            f"none (missing: {path.replace(':', '.')}, PyTorch: {torch.__version__}, tested: "
            f"{', '.join(TESTED)}); do without them, or use a tested version",
            RuntimeWarning,
            stacklevel=3,
        )
        return answer

    return Name(path, feature, instead)


_C, _AUTOGRAD = "torch._C:", "torch._C._autograd:"
_STREAMS = "streams of accelerators"
_FUNCTIONS, _DISPATCH = "torch-function modes", "dispatch modes"
_HOOKS, _TREES = "hooks for saved tensors", "nested structures of tensors"
_SELECTIVE = "selective checkpoints"
_COMPILER, _VIRTUAL = "compiled layers", "virtual accelerators"

#: What this package calls each, and the name itself.
NAMES: dict[str, Name] = {
    # Several times as fast as the functions of torch.accelerator.
    "get_stream": Name(_C + "_accelerator_getStream", _STREAMS, torch.accelerator.current_stream),
    "set_stream": Name(_C + "_accelerator_setStream", _STREAMS, torch.accelerator.set_stream),
    "get_device_index": Name(
        _C + "_accelerator_getDeviceIndex", _STREAMS, torch.accelerator.current_device_index
    ),
    "set_device_index": Name(
        _C + "_accelerator_setDeviceIndex", _STREAMS, torch.accelerator.set_device_index
    ),
    # What a thread has set.
    "set_grad": Name(_C + "_set_grad_enabled", "gradient modes", torch.set_grad_enabled),
    "is_multithreading_enabled": Name(
        _C + "_is_multithreading_enabled", "set_multithreading_enabled"
    ),
    "count_function_modes": Name(_C + "_len_torch_function_stack", _FUNCTIONS),
    "function_mode_at": Name(_C + "_get_function_stack_at", _FUNCTIONS),
    "push_function_mode": Name(_C + "_push_on_torch_function_stack", _FUNCTIONS),
    "pop_function_mode": Name(_C + "_pop_torch_function_stack", _FUNCTIONS),
    "count_dispatch_modes": _unseen(_C + "_len_torch_dispatch_stack", _DISPATCH, 0),
    "dispatch_mode_at": Name(_C + "_get_dispatch_stack_at", _DISPATCH),
    "push_dispatch_mode": Name(_C + "_push_on_torch_dispatch_stack", _DISPATCH),
    "pop_dispatch_mode": Name(_C + "_pop_torch_dispatch_stack", _DISPATCH),
    "without_modes": Name(_C + "_DisableTorchDispatch", _DISPATCH),
    # Without it, `with torch.device(...)` counts as a mode of the user's, under which workers must
    # not run, so that the caller computes all cells.
    "DeviceContext": Name("torch.utils._device:DeviceContext", "with torch.device(...)", ()),
    "top_hooks": _unseen(_AUTOGRAD + "_top_saved_tensors_default_hooks", _HOOKS, None),
    "pop_hooks": Name(_AUTOGRAD + "_pop_saved_tensors_default_hooks", _HOOKS),
    "hooks_forbidden": _unseen(
        _AUTOGRAD + "_saved_tensors_hooks_get_disabled_error_message", _HOOKS, None
    ),
    "transform_level": _unseen(
        "torch._C._functorch:maybe_current_level", "torch.func transforms", None
    ),
    # Without it, a batch of gradients is not noticed, and PyTorch's own error comes later.
    "is_batched": Name(
        "torch._C._functorch:is_legacy_batchedtensor",
        "several gradients at once",
        lambda _: False,
    ),
    "is_wrapped": Name(
        "torch._C._functorch:is_functorch_wrapped_tensor", "torch.vmap", lambda _: False
    ),
    "unwrapped": Name("torch._C._functorch:get_unwrapped", "torch.vmap"),
    # Without it, each tensor is looked at.
    "forward_level": Name(
        "torch.autograd.forward_ad:_current_level",
        "forward-mode differentiation",
        lambda: 0,
        question=True,
    ),
    # The public function cannot say that the last query sees all keys, but by a tensor of a mask.
    "flash_attention": Name(
        "torch.ops:aten._scaled_dot_product_flash_attention", "attention of slices without masks"
    ),
    # Autograd.
    "queue_callback": Name(
        "torch.autograd:Variable._execution_engine.queue_callback", "callbacks after backward"
    ),
    # The public functions refuse a root whose gradient has yet to be summed to the root's shape.
    "run_backward": Name(
        "torch.autograd:Variable._execution_engine.run_backward", "backward within a step"
    ),
    # How many hooks there were so far. Without it, the hooks of each node are looked for.
    "count_handles": Name(
        "torch.utils.hooks:RemovableHandle.next_id",
        "hooks of nodes",
        count().__next__,
        question=True,
    ),
    # Without it, a function in Python takes three times as long.
    "dead_end": Name(_C + "_functions.DelayedError", "schedules"),
    # One call for all weights of a stage.
    "add_each": Name("torch:_foreach_add_", "sums of gradients"),
    "multiply_each": Name("torch:_foreach_mul_", "sums of gradients"),
    # Without it, nobody knows which block of a model a backward is in.
    # Without it, recomputations of cells go to their ends.
    "next_node": Name(_AUTOGRAD + "_get_sequence_nr", "the end of recomputation", lambda: -1),
    # Without it, memory is not known to be of one tensor, nor to be held by others: no number is
    # equal to this one, or less.
    "count_uses": Name(_C + "_storage_Use_Count", "memory of one tensor", lambda _: nan),
    "is_alias_of": Name(_C + "_is_alias_of", "views that share memory"),
    # Selective checkpoints. Without these, policies count what one of the two runs alone does.
    "KeepingMode": Name("torch.utils.checkpoint:_CachingTorchDispatchMode", _SELECTIVE, ()),
    "GivingMode": Name("torch.utils.checkpoint:_CachedTorchDispatchMode", _SELECTIVE, ()),
    # Structures.
    "containers": Name("torch.utils._pytree:SUPPORTED_NODES", _TREES),
    "node_type": Name("torch.utils._pytree:_get_node_type", _TREES),
    "leaves_with_path": Name("torch.utils._pytree:tree_leaves_with_path", _TREES),
    "keystr": Name("torch.utils._pytree:keystr", _TREES),
    # Layers.
    "BatchNorm": Name("torch.nn.modules.batchnorm:_BatchNorm", "batch normalisations"),
    # The profiler, and graphs.
    "DispatchMode": Name(
        "torch.utils._python_dispatch:TorchDispatchMode", "memory where no allocator counts it"
    ),
    "FakeTensor": Name("torch._subclasses.fake_tensor:FakeTensor", "stages that are graphs"),
    # Without it, fake tensors put nothing in a missing GPU's place.
    "ensure_guard": Name(_C + "_ensureCUDADeviceGuardSet", "stages that are graphs", lambda: None),
    # The compiler.
    "OptimizedModule": Name("torch._dynamo.eval_frame:OptimizedModule", _COMPILER, ()),
    "compiler_config": Name("torch._dynamo:config", _COMPILER),
    "compile_callbacks": Name("torch._dynamo.callback:callback_handler", _COMPILER),
    # Without it, layers that were compiled before the first step are not known to be compiled.
    "compiled_codes": Name(
        "torch._dynamo.convert_frame:input_codes", _COMPILER, SimpleNamespace(seen=())
    ),
    "set_code_strategy": Name("torch._C._dynamo.eval_frame:set_code_exec_strategy", _COMPILER),
    "FrameStrategy": Name("torch._C._dynamo.eval_frame:_FrameExecStrategy", _COMPILER),
    "FrameAction": Name("torch._C._dynamo.eval_frame:_FrameAction", _COMPILER),
    "set_lru_cache": Name("torch._C._dynamo.eval_frame:_set_lru_cache", _COMPILER),
    # Virtual accelerators.
    "backend_name": Name(_C + "_get_privateuse1_backend_name", _VIRTUAL),
    "register_device_module": Name("torch:_register_device_module", _VIRTUAL),
    "graph_task": Name(_C + "_current_graph_task_id", _VIRTUAL),
    "all_operators": Name(_C + "_dispatch_get_all_op_names", _VIRTUAL),
    "has_kernel": Name(_C + "_dispatch_has_kernel_for_dispatch_key", _VIRTUAL),
    "schemas_of": Name(_C + "_jit_get_schemas_for_operator", _VIRTUAL),
}

#: Attributes of modules, tensors and functions whose names begin with an underscore, and why they
#: are used where they stand: a function of this room around each would only hide them.
ATTRIBUTES = {
    "_modules": "The children of a module by name. Indexing a Sequential takes much longer.",
    "_parameters": "The table of a module's parameters, where others put tensors, too.",
    "_buffers": "The same of its buffers.",
    "_non_persistent_buffers_set": "Which buffers no state dict has.",
    "_compiled_call_impl": "Whether compile() was called on a module, and what a call of it calls.",
    "_call_impl": "What it calls otherwise: forward with its hooks.",
    "_forward_pre_hooks": "Tables of forward hooks, which a recomputation must find as they were.",
    "_forward_pre_hooks_with_kwargs": "The same.",
    "_forward_hooks": "The same.",
    "_forward_hooks_with_kwargs": "The same.",
    "_forward_hooks_always_called": "The same.",
    "_apply": "What Module.to() and the like call, to be overridden.",
    "_load_from_state_dict": "What Module.load_state_dict() calls for each module in the same way.",
    "_metadata": "The versions of layers in a state dict.",
    "_version": "How often a tensor was changed in place.",
    "_base": "What a tensor is a view of.",
    "_cdata": "The address of a storage, by which its uses are counted.",
    "_backward_hooks": "The table of a tensor's hooks, which are not for the parts of a gradient.",
    "_register_hook_dict": "What calls such a table before the node behind a tensor runs.",
    "_backward_pre_hooks": "A module's hooks around its backward.",
    "_neg_view": "A tensor with the other negative bit, over the same memory.",
    "_indices": "The parts of a sparse tensor, also of one that is not coalesced.",
    "_values": "The same.",
    "_torchdynamo_disable": "What the compiler asks functions for.",
    "_torchdynamo_disable_msg": "The same.",
    "_sequence_nr": "The number of a node, by which autograd chooses among nodes that are ready.",
    "_check_input_dim": "What a batch normalisation checks of its input.",
}


def look_up(name: str) -> Any:
    """Find what a name of the table stands for.

    Raises:
        RuntimeError: PyTorch does not have it, and nothing can be used instead.
    """
    path, feature, instead, question = NAMES[name]
    module, _, attributes = path.partition(":")
    *owners, last = attributes.split(".")
    try:
        owner: Any = import_module(module)
        for attribute in owners:
            owner = getattr(owner, attribute)
        found = getattr(owner, last)
    except (ImportError, AttributeError):
        if instead is None:
            raise _missing(path, feature) from None
        return instead
    return (lambda: getattr(owner, last)) if question else found


def has(name: str) -> bool:
    """Whether PyTorch has a name of the table."""
    try:
        return look_up(name) is not NAMES[name].instead
    except RuntimeError:
        return False


def _missing(path: str, feature: str) -> RuntimeError:
    return RuntimeError(
        f"torchgpipe needs a private name of PyTorch for {feature}, which this PyTorch does not "
        f"have (missing: {path.replace(':', '.')}, PyTorch: {torch.__version__}, tested: "
        f"{', '.join(TESTED)}); do without {feature}, or use a tested version"
    )
