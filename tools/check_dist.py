"""Look into the sdist and the wheel, and use the wheel alone, in a fresh environment.

``make dist`` calls it.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: PyTorch works without NumPy, and says so.
QUIET = ["-W", "ignore:Failed to initialize NumPy"]

TRAIN = """
import sys
import torch
from torch import nn
import torchgpipe
from torchgpipe import GPipe

assert torchgpipe.__file__.startswith(sys.prefix), torchgpipe.__file__
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
model = GPipe(layers, balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
input = torch.rand(64, 2)
losses = []
for _ in range(50):
    optimizer.zero_grad()
    loss = (model(input) - input.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(f"trained on the CPU, torch {torch.__version__}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
"""

VIRTUAL = """
import os
import torch
from torch import nn
from torchgpipe import GPipe, testing

try:
    devices = testing.load(2)
except testing.UnavailableError as error:
    if "C++ compiler" not in str(error) or os.environ.get("TORCHGPIPE_REQUIRE_VIRTUAL") == "1":
        raise
    print(f"skipped the virtual accelerators: {error}")
else:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = GPipe(layers, balance=[1, 1], devices=devices, chunks=4)
    with testing.observe() as seen:
        model(torch.rand(8, 2, device=devices[0])).sum().backward()
    assert not seen.races, seen.races
    print("trained on virtual accelerators, without races")
"""

TRAINER = """
import torch
from torchgpipe import MappedGPipe
from torchgpipe.transformers import pipelined
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
ids = torch.randint(64, (16, 8))
data = [{"input_ids": x, "labels": x} for x in ids]
places = {"transformer": "cpu", "lm_head": "cpu"}
args = TrainingArguments("out", report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
pipe = MappedGPipe(model, places, chunks=4)
done = pipelined(Trainer)(model=pipe, args=args, train_dataset=data).train()
print(f"trained with the Trainer of Transformers: loss {done.training_loss:.3f}")
"""


def check_contents(names: list[str]) -> None:
    """Raise unless an archive has all files of the package, and no tests."""
    package = ROOT / "torchgpipe"
    wanted = [*package.rglob("*.py"), *package.glob("testing/csrc/*"), package / "py.typed"]
    missing = {str(path.relative_to(ROOT)) for path in wanted} - set(names)
    if missing:
        raise SystemExit(f"an archive lacks files of the package (missing: {sorted(missing)})")
    tests = [name for name in names if name.startswith("tests/")]
    if tests:
        raise SystemExit(f"an archive contains tests (found: {tests})")


def main() -> None:
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with tarfile.open(sdist) as tar:
        check_contents([name.partition("/")[2] for name in tar.getnames()])
    with zipfile.ZipFile(wheel) as zip:
        check_contents(zip.namelist())
    print(f"{sdist.name} and {wheel.name} have the files of the package, and no tests")

    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pip = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, str(wheel)], check=True)
        # With an empty cache, the library is compiled from what the wheel has.
        environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder, "cache"))}
        for program in (TRAIN, VIRTUAL, TRAINER):
            if program is TRAINER:
                # The extra brings all that a Trainer needs.
                subprocess.run([*pip, f"{wheel}[transformers]"], check=True)
            subprocess.run([python, *QUIET, "-c", program], check=True, cwd=folder, env=environment)


if __name__ == "__main__":
    main()
