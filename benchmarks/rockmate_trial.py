"""Rockmate from PyPI, tried in an environment of its own; what came of it, a row for each model.

    python benchmarks/rockmate_trial.py M4 0.25     what is run in that environment

Rockmate pins an older PuLP, so it cannot live beside this library. Its latest release (2.0.0) asks for rkgb 2.0.0,
whose archive holds two files of the package only; so where it cannot be imported, the release before it comes next.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

RELEASES = {"latest": ["rockmate"], "1.0.1": ["rockmate==1.0.1", "rkgb==1.0.1", "psutil"]}
"""What to install. rkgb 1.0.1 imports psutil without asking for it."""


def rockmate_rows(models: Sequence[str], scale: float, limit_s: float = 300.0) -> list[dict]:
    """Return what came of trying every release on every model, as rows of the table.

    Args:
        models: Names of models.
        scale: What to multiply their batches by.
        limit_s: Seconds for each command.
    """
    rows: list[dict] = []
    for release, packages in RELEASES.items():
        with tempfile.TemporaryDirectory() as folder:
            python = str(Path(folder) / "bin" / "python")
            pinned = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
            said = (
                _failure([sys.executable, "-m", "venv", folder], limit_s)
                or _failure([python, "-m", "pip", "install", "--quiet", *packages, *pinned], limit_s)
                or _failure([python, "-c", "import rockmate"], limit_s)
            )
            if said:
                rows.append({"way": f"Rockmate, {release} release", "remark": f"not run: {said}"})
                continue
            for model in models:
                said = _failure([python, __file__, model, str(scale)], limit_s)
                remark = f"not run: {said}" if said else "runs here; not measured by this script"
                rows.append({"model": model, "way": f"Rockmate, {release} release", "remark": remark})
            break
    return rows


def _failure(command: Sequence[str], limit_s: float) -> str:
    """Run a command; return the last line it complained with, or nothing where it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def try_model(name: str, scale: float) -> None:
    """Let Rockmate make a schedule for a model at half of what it measured, and train one step with it."""
    import torch
    from models import build
    from rockmate import Rockmate

    class Logits(torch.nn.Module):
        """Take tokens by position: Rockmate refuses a forward with any `**kwargs`."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens).logits

    model, batch, _ = build(name, dropout=0.0, scale=scale)
    if isinstance(batch, dict):
        model, batch = Logits(model), (batch["input_ids"],)
    planned = Rockmate(model, list(batch), solve=False)
    measured = sum(node.mem for graph in planned.list_kg for node in graph.list_kdn)
    if not measured:
        sys.exit(f"Rockmate measured 0 bytes in all {len(planned.list_kg)} blocks: rkgb measures on CUDA devices only")
    planned.get_chain()
    planned.get_sequence(measured / 2)
    planned.get_compiled_fct()
    planned(*batch).square().mean().backward()
    planned.backward()


if __name__ == "__main__":
    try_model(sys.argv[1], float(sys.argv[2]))
