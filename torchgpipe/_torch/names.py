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

#: The versions of PyTorch that the tests have run with; errors and warnings list them.
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

#: For each name that this package gives to a private name of PyTorch, where PyTorch has that name.
#: Comments that begin with "Without NAME" say what happens if PyTorch lacks it.
NAMES: dict[str, Name] = {
    # These four are several times as fast as the functions of torch.accelerator.
    "get_stream": Name(_C + "_accelerator_getStream", _STREAMS, torch.accelerator.current_stream),
    "set_stream": Name(_C + "_accelerator_setStream", _STREAMS, torch.accelerator.set_stream),
    "get_device_index": Name(
        _C + "_accelerator_getDeviceIndex", _STREAMS, torch.accelerator.current_device_index
    ),
    "set_device_index": Name(
        _C + "_accelerator_setDeviceIndex", _STREAMS, torch.accelerator.set_device_index
    ),
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
    # Without DeviceContext, `with torch.device(...)` counts as a torch-function mode of the user's.
    # Worker threads do not run under such a mode: the thread of the caller computes all cells.
    "DeviceContext": Name("torch.utils._device:DeviceContext", "with torch.device(...)", ()),
    "top_hooks": _unseen(_AUTOGRAD + "_top_saved_tensors_default_hooks", _HOOKS, None),
    "pop_hooks": Name(_AUTOGRAD + "_pop_saved_tensors_default_hooks", _HOOKS),
    "hooks_forbidden": _unseen(
        _AUTOGRAD + "_saved_tensors_hooks_get_disabled_error_message", _HOOKS, None
    ),
    "transform_level": _unseen(
        "torch._C._functorch:maybe_current_level", "torch.func transforms", None
    ),
    # Without is_batched, a call of grad() with is_grads_batched=True gets PyTorch's own error,
    # which comes later and does not say what to do.
    "is_batched": Name(
        "torch._C._functorch:is_legacy_batchedtensor",
        "several gradients at once",
        lambda _: False,
    ),
    "is_wrapped": Name(
        "torch._C._functorch:is_functorch_wrapped_tensor", "torch.vmap", lambda _: False
    ),
    "unwrapped": Name("torch._C._functorch:get_unwrapped", "torch.vmap"),
    # Without forward_level, forward mode counts as active, and each tensor is asked for a tangent.
    "forward_level": Name(
        "torch.autograd.forward_ad:_current_level",
        "forward-mode differentiation",
        lambda: 0,
        question=True,
    ),
    # A slice of a sequence has fewer queries than keys, and its last query must see all keys. For
    # that, the public function scaled_dot_product_attention() needs a mask (a tensor).
    "flash_attention": Name(
        "torch.ops:aten._scaled_dot_product_flash_attention", "attention of slices without masks"
    ),
    "queue_callback": Name(
        "torch.autograd:Variable._execution_engine.queue_callback", "callbacks after backward"
    ),
    # run_backward sums a gradient to its tensor's shape, where torch.autograd.grad() refuses it.
    "run_backward": Name(
        "torch.autograd:Variable._execution_engine.run_backward", "backward within a step"
    ),
    # count_handles counts the hooks of the process so far. Only if the count has changed are nodes
    # searched for hooks. Without count_handles, each count differs, and nodes are always searched.
    "count_handles": Name(
        "torch.utils.hooks:RemovableHandle.next_id",
        "hooks of nodes",
        count().__next__,
        question=True,
    ),
    # dead_end makes a node that raises in backward, in a third of the time of a node in Python.
    "dead_end": Name(_C + "_functions.DelayedError", "schedules"),
    # One call of add_each or multiply_each changes the gradients of all weights of a stage.
    "add_each": Name("torch:_foreach_add_", "sums of gradients"),
    "multiply_each": Name("torch:_foreach_mul_", "sums of gradients"),
    # Without next_node, a recomputation runs on after the last tensor that backward needs.
    "next_node": Name(_AUTOGRAD + "_get_sequence_nr", "the end of recomputation", lambda: -1),
    # Without count_uses, is_alone() and is_held() return False for all memory, since no comparison
    # with nan is true.
    "count_uses": Name(_C + "_storage_Use_Count", "memory of one tensor", lambda _: nan),
    "is_alias_of": Name(_C + "_is_alias_of", "views that share memory"),
    # Without KeepingMode and GivingMode, a selective policy also sees the operators that only the
    # forward or only the recomputation calls.
    "KeepingMode": Name("torch.utils.checkpoint:_CachingTorchDispatchMode", _SELECTIVE, ()),
    "GivingMode": Name("torch.utils.checkpoint:_CachedTorchDispatchMode", _SELECTIVE, ()),
    "containers": Name("torch.utils._pytree:SUPPORTED_NODES", _TREES),
    "node_type": Name("torch.utils._pytree:_get_node_type", _TREES),
    "leaves_with_path": Name("torch.utils._pytree:tree_leaves_with_path", _TREES),
    "keystr": Name("torch.utils._pytree:keystr", _TREES),
    "BatchNorm": Name("torch.nn.modules.batchnorm:_BatchNorm", "batch normalisations"),
    "DispatchMode": Name(
        "torch.utils._python_dispatch:TorchDispatchMode", "memory where no allocator counts it"
    ),
    "FakeTensor": Name("torch._subclasses.fake_tensor:FakeTensor", "stages that are graphs"),
    # If PyTorch lacks ensure_guard, fake tensors register no guard, and keep_guard() does nothing.
    "ensure_guard": Name(_C + "_ensureCUDADeviceGuardSet", "stages that are graphs", lambda: None),
    "OptimizedModule": Name("torch._dynamo.eval_frame:OptimizedModule", _COMPILER, ()),
    "compiler_config": Name("torch._dynamo:config", _COMPILER),
    "compile_callbacks": Name("torch._dynamo.callback:callback_handler", _COMPILER),
    # Without compiled_codes, nothing is prepared for functions compiled before the first step.
    "compiled_codes": Name(
        "torch._dynamo.convert_frame:input_codes", _COMPILER, SimpleNamespace(seen=())
    ),
    "set_code_strategy": Name("torch._C._dynamo.eval_frame:set_code_exec_strategy", _COMPILER),
    "FrameStrategy": Name("torch._C._dynamo.eval_frame:_FrameExecStrategy", _COMPILER),
    "FrameAction": Name("torch._C._dynamo.eval_frame:_FrameAction", _COMPILER),
    "set_lru_cache": Name("torch._C._dynamo.eval_frame:_set_lru_cache", _COMPILER),
    "backend_name": Name(_C + "_get_privateuse1_backend_name", _VIRTUAL),
    "register_device_module": Name("torch:_register_device_module", _VIRTUAL),
    "graph_task": Name(_C + "_current_graph_task_id", _VIRTUAL),
    "all_operators": Name(_C + "_dispatch_get_all_op_names", _VIRTUAL),
    "has_kernel": Name(_C + "_dispatch_has_kernel_for_dispatch_key", _VIRTUAL),
    "schemas_of": Name(_C + "_jit_get_schemas_for_operator", _VIRTUAL),
}

#: For each private attribute of modules, tensors or functions that this package uses, what it is.
#: All rooms use them directly, since functions around them would only hide them.
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
        value = getattr(owner, last)
    except (ImportError, AttributeError):
        if instead is None:
            raise _missing(path, feature) from None
        return instead
    return (lambda: getattr(owner, last)) if question else value


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
