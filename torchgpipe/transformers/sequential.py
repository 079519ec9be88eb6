"""Models of Transformers as an :class:`nn.Sequential`, by the plans that their configurations have.

The field ``base_model_pp_plan`` of a configuration names the modules of a model in their order, and
``_pp_plan`` of its class the head::

    embed_tokens   input_ids                       → inputs_embeds
    layers         hidden_states, attention_mask   → hidden_states
    norm           hidden_states                   → hidden_states
    lm_head        hidden_states                   → logits

The plan does not say what the model's own code does in between: masks and positions are made of the
arguments, and some models scale what the embedding returns. So each layer here is the model itself
with one of these modules, and its own forward is called. It takes ``inputs_embeds``, which are what
the layer before has returned. Masks and positions are made again in each of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []


#: The argument of models of Transformers by which a layer gets what the layer before returned.
HIDDEN = "inputs_embeds"


def layers_of(model: Any) -> nn.Sequential:
    """Make an :class:`nn.Sequential` of a causal model of Transformers.

    ::

        layers = layers_of(model)
        pipe = Pipe(layers, balance, chunks=8, loss=causal_loss)
        loss = pipe.step({"input_ids": ids, "attention_mask": mask}, labels)

    Its layers are the embedding, each block, the norm and the head, with the parameters of the
    model, which train the model. The input is the tensor of tokens, or a dict of arguments; the
    output are the logits, or the hidden states of a model without a head.

    Args:
        model: the model, on one device. It computes two tokens, to see whether its layers compute
            the same.

    Returns:
        The layers, for :class:`~torchgpipe.distributed.Pipe`, :class:`~torchgpipe.GPipe` and
        :class:`~torchgpipe.ScheduledLoss`.

    Raises:
        ValueError: the model has no plan, or a plan of another form; or the layers do not compute
            what the model does, since its own code changes what passes between them, or its head
            takes more than that.
    """
    base = model.base_model
    plan: dict[str, Any] = getattr(base.config, "base_model_pp_plan", None) or {}
    # Read from the class: the object's own ``_pp_plan`` has the plan of the base model in it, too.
    heads = [] if model is base else [*(getattr(type(model), "_pp_plan", None) or {})]
    if [*plan][1:] != ["layers", "norm"] or heads != ["lm_head"][: model is not base]:
        raise ValueError(
            "a model must have a plan of an embedding, layers, a norm and a head (model: "
            f"{type(model).__name__}, plan: {[*plan, *heads]}); use MappedGPipe, which "
            "takes any model"
        )
    first = next(iter(plan))
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts[first] = ModelLayer(_shell(base, [], first), "last_hidden_state")
    for k, layer in enumerate(base.layers):
        parts[f"layers_{k}"] = ModelLayer(_shell(base, [layer], number=k), "last_hidden_state")
    parts["norm"] = ModelLayer(_shell(base, [], "norm"), "last_hidden_state")
    if heads:
        parts["lm_head"] = ModelLayer(_around(model, base), "logits")
    layers = nn.Sequential(parts)
    _verify(model, layers, ModelLayer(_shell(base, []), "last_hidden_state"))
    return layers


class ModelLayer(nn.Module):
    """One layer: a model with some of its modules, and the name of the output that counts."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self._output = model, output

    def forward(self, value: Tensor | Mapping[str, Any]) -> Any:
        """Compute the layer: a dict of arguments to a dict of them, or to the logits."""
        arguments = {"input_ids": value} if isinstance(value, Tensor) else {**value}
        output = getattr(self.model(**arguments, use_cache=False), self._output)
        if self._output == "logits":
            return output
        arguments.pop("input_ids", None)
        return {**arguments, HIDDEN: output}


class Computed(nn.Module):
    """Stand in for a base model whose output was computed by earlier layers."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        """Return the hidden states as the output of the base model."""
        return _output(inputs_embeds)


def _output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=hidden)


def _shell(base: Any, layers: list[nn.Module], *kept: str, number: int = 0) -> Any:
    """Copy a base model with some layers and some modules of its plan; its code stays."""
    shell, config = _copied(base), copy.deepcopy(base.config)
    for name, x in vars(base.config).items():
        if isinstance(x, list) and len(x) == base.config.num_hidden_layers:
            # A list with an entry for each layer, as attention types are, keeps this layer's entry.
            vars(config)[name] = x[number : number + 1]
    vars(config)["num_hidden_layers"] = len(layers)
    shell.config = config
    for name, module in base.named_children():
        if name in kept:
            shell._modules[name] = module
        elif name not in base.config.base_model_pp_plan:
            # Modules in no plan, as for rotary positions, have no parameters: a copy is as good.
            shell._modules[name] = copy.deepcopy(module)
        else:
            shell._modules[name] = nn.Identity()
    shell._modules["layers"] = nn.ModuleList(layers)
    return shell


def _around(model: Any, base: nn.Module) -> Any:
    """A model with its head, and without its base model."""
    shell = _copied(model)
    for name, module in model.named_children():
        shell._modules[name] = Computed() if module is base else module
    return shell


def _copied(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, and a table of modules of its own."""
    shell = copy.copy(module)
    shell._modules = {}
    return shell


def _verify(model: Any, layers: nn.Sequential, empty: ModelLayer) -> None:
    """Check, with two tokens, that layers compute what the model does.

    An empty part, without any of them, has to return what it is given.

    Raises:
        ValueError: they do not.
    """
    weight, width = next(model.parameters()), model.base_model.config.hidden_size
    hidden = torch.linspace(1, 2, 2 * width, device=weight.device, dtype=weight.dtype)
    ids = torch.tensor([[1, 2]], device=weight.device)
    hidden, reason = hidden.reshape(1, 2, width), ""
    modules = [*model.modules(), *layers.modules()]
    training = [x.training for x in modules]
    try:
        with torch.no_grad():
            # Train mode, since in eval mode dropout in the model's own code would not show.
            if not torch.equal(empty.train()({HIDDEN: hidden})[HIDDEN], hidden):
                reason = "the model's code changes what the embedding returns"
            layers.eval()
            expected = model.eval()(input_ids=ids, use_cache=False)[0]
            computed = layers(ids)
        computed = computed if isinstance(computed, Tensor) else computed[HIDDEN]
        if not reason and not torch.allclose(computed, expected, rtol=1e-2, atol=1e-3):
            reason = "the model computes something else"
    except AttributeError as error:
        reason = f"the model's head needs more than they return: {error}"
    finally:
        for x, mode in zip(modules, training):
            x.training = mode
    if reason:
        raise ValueError(
            "the layers of a model must hand on hidden states as they are "
            f"(model: {type(model).__name__}, {reason}); use MappedGPipe, which takes any model"
        )
