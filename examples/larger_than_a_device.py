"""Load a model shard by shard, so that neither the host nor one device ever holds all of it.

The layers are made on the meta device, without memory. GPipe gives each partition memory on its
device, filled with NaN. Then weights are loaded file by file, from files in the layout of Hugging
Face (safetensors and an index), with the names of another library. Last, partitions are saved one
by one, in the same layout. To check the result, the example also has the whole plain model in
memory, which a model that is really too large would not allow.

    pip install safetensors
    python -m examples.larger_than_a_device
    python -m examples.larger_than_a_device --width 512 --blocks 24
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.options import at_least
from examples.places import places
from torchgpipe import GPipe

PARTITIONS = 4
INDEX = "model.safetensors.index.json"


def load_shards(model: GPipe, path: Path, own_name: dict[str, str]) -> None:
    """Load files one by one.

    Args:
        model: the wrapped model, which was made on the meta device.
        path: the folder of the index and the files.
        own_name: the names of layers in the nn.Sequential, by their names in the files.
    """
    files = json.loads((path / INDEX).read_text("utf-8"))["weight_map"]
    missing = set(model.state_dict())
    for file in sorted(set(files.values())):
        # No variable holds the tensors of a file, so they are freed before the next file is read.
        keys = model.load_state_dict(
            {renamed(name, own_name): x for name, x in load_file(path / file).items()},
            strict=False,
        )
        missing &= set(keys.missing_keys)
        if keys.unexpected_keys:
            raise ValueError(f"the model has no {keys.unexpected_keys}, but {file} has")
    if missing:
        raise ValueError(f"no file has {sorted(missing)}")
    if nan := not_loaded(model):
        raise ValueError(f"no file has buffers that are not in the state dict: {nan}")


def renamed(name: str, names: dict[str, str]) -> str:
    """The name of a tensor after its layer was renamed by ``names``."""
    return next((names[x] + name[len(x) :] for x in names if name.startswith(f"{x}.")), name)


def not_loaded(model: nn.Module) -> list[str]:
    """The names of tensors with NaN, which GPipe puts into tensors until they are loaded."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, x in tensors if x.isnan().any()]


def size(module: nn.Module) -> int:
    """The bytes of the state dict."""
    return sum(x.nbytes for x in module.state_dict().values())


def save_shards(parts: Iterable[nn.Module], path: Path, other_name: dict[str, str]) -> int:
    """Save partitions one by one; return the bytes of the largest file."""
    files: dict[str, str] = {}
    largest = total = 0
    for j, part in enumerate(parts):
        shard = {renamed(name, other_name): x for name, x in part.state_dict().items()}
        save_file(shard, path / (file := f"model-{j + 1:05}.safetensors"))
        files |= dict.fromkeys(shard, file)
        largest, total = max(largest, size(part)), total + size(part)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (path / INDEX).write_text(json.dumps(index), "utf-8")
    return largest


class Block(nn.Module):
    """Attention with rotary positions, and two linear layers behind it."""

    inverse: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        # No file has this buffer, so it is computed on the CPU, even within torch.device("meta").
        inverse = 10000 ** -(torch.arange(0, width, 2, device="cpu") / width)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.size(1), device=x.device)[:, None] * self.inverse
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k, v = self.project(self.norm(x)).chunk(3, dim=-1)
        q, k = ((torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn) for y in (q, k))
        q, k = torch.view_as_real(q).flatten(-2), torch.view_as_real(k).flatten(-2)
        y = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + self.mlp(y)


def decoder(blocks: int, width: int) -> nn.Sequential:
    """A small language model."""
    inner = [Block(width) for _ in range(blocks)]
    return nn.Sequential(
        nn.Embedding(256, width), *inner, nn.LayerNorm(width), nn.Linear(width, 256)
    )


def main(arguments: list[str] | None = None) -> int:
    """Write shards, load and save them; return 0 if all is equal to the plain model."""
    parser = argparse.ArgumentParser(description="Load a model partition by partition.")
    parser.add_argument("--blocks", type=at_least(1), default=12)
    parser.add_argument("--width", type=at_least(2), default=128, help="an even number")
    options = parser.parse_args(arguments)
    if options.width % 2:
        parser.error(f"argument --width: must be even (value: {options.width})")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = options.blocks
    # The names of the layers in the files, and in the nn.Sequential.
    others = ["model.embed", *[f"model.layers.{k}" for k in range(blocks)], "model.norm", "lm_head"]
    own_name = {name: str(k) for k, name in enumerate(others)}
    other_name = {own: name for name, own in own_name.items()}

    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        # Another library has saved five layers in each file.
        plain = decoder(blocks, options.width).eval()
        parts = [plain[k : k + 5] for k in range(0, len(plain), 5)]
        largest = save_shards(parts, Path(source), other_name)

        with torch.device("meta"):
            module = decoder(blocks, options.width)
        balance = [len(x) for x in torch.arange(len(module)).tensor_split(PARTITIONS)]
        model = GPipe(module, balance, devices=places(PARTITIONS), chunks=4).eval()
        load_shards(model, Path(source), own_name)
        save_shards(model.partitions, Path(target), other_name)
        saved = {
            k: x for file in Path(target).glob("*.safetensors") for k, x in load_file(file).items()
        }

    x = torch.randint(256, (8, 32))
    with torch.no_grad():
        output = model(x.to(model.devices[0])).cpu()
        apart = (output - plain(x)).abs().max().item()
    tensors = {renamed(name, other_name): x for name, x in plain.state_dict().items()}
    lost = [k for k, x in tensors.items() if k not in saved or not torch.equal(x, saved[k])]
    print(f"{'the whole model':<19} {size(plain) / 2**20:7.2f} MiB")
    for j, (partition, device) in enumerate(zip(model.partitions, model.devices)):
        where = f"partition {j}, {device}"
        print(f"{where:<19} {size(partition) / 2**20:7.2f} MiB")
    print(
        f"{'the largest file':<19} {largest / 2**20:7.2f} MiB, which is what the host holds at once"
    )
    print(f"outputs differ from the plain model's by {apart:.1e} at most")
    if apart > 1e-4 or lost or len(saved) != len(tensors):
        print(f"Not as it should be: outputs differ, or tensors were not saved as loaded: {lost}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
