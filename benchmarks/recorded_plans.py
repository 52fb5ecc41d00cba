"""Record steps once, and write down every solver's plans of them, to compare one version of the code with another.

    python benchmarks/recorded_plans.py record --folder recorded/ --scale 0.25
    python benchmarks/recorded_plans.py plan --folder recorded/ --out before.json
    python benchmarks/recorded_plans.py compare before.json after.json

Profiles are data, so the same step gives the same problem as long as the bridge is the same; a problem that differs
is told apart from a plan that differs.
"""

import argparse
import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from models import NAMES, build
from plan_quality import trial_step
from remat.planner.bridge.bridge import Bridge
from remat.planner.bridge.host_costs import HostCosts, HostCostsByCache
from remat.profiler import Profile, profile
from remat.solvers import SOLVERS, BudgetTooSmallError, Problem, Solution

HOST = HostCosts(region_ns=250_000, selective_ns=15_000)
"""What the host pays for a region and for an operator in a selective one, in nanoseconds: the same on every machine."""
BUDGETS = (80, 60, 40, 0)
"""Budgets in per cent of the unplanned peak; 0 asks for the least peak."""
MODELS = ("M1s", "M1e", "M2", "M3", "M4", "M5")


def record(folder: Path, names: list[str], scale: float) -> None:
    """Save a profile of each model's step: as it is trained, with times; and as the table of least peaks has it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        model, batch, loss = build(name, scale=scale)
        profile(model, batch, loss=loss, repeats=3).save(folder / f"{name}.json")
        model, batch, loss = trial_step(name, scale)
        profile(model, batch, loss=loss, accumulation=True, repeats=0).save(folder / f"{name}-least.json")
        print(name, flush=True)


def recorded_problems(folder: Path, save_sets: bool) -> dict[str, tuple[Bridge, Profile]]:
    """Return the bridge and the profile of each recorded step."""
    profiles = {path.stem: Profile.load(path) for path in sorted(folder.glob("*.json"))}
    return {
        name: (Bridge(found, HostCostsByCache(warm=HOST, cold=HOST), save_sets=save_sets), found)
        for name, found in profiles.items()
    }


def plans(folder: Path, solvers: list[str], time_limit_s: float) -> dict[str, dict]:
    """Return what each solver finds for each problem and budget."""
    found: dict[str, dict] = {}
    for save_sets in (True, False):
        for name, (bridge, recorded) in recorded_problems(folder, save_sets).items():
            for share in BUDGETS:
                problem = bridge.problem(max(1, share * recorded.peak_bytes() // 100))
                digest = sha256(json.dumps(asdict(problem)).encode()).hexdigest()[:16]
                for solver in solvers:
                    solution = solved(solver, problem, time_limit_s)
                    key = f"{name} {share} % {solver}{'' if save_sets else ', no save sets'}"
                    found[key] = {
                        "problem": digest,
                        "peak_bytes": solution.peak_bytes,
                        "added_ns": solution.added_ns,
                        "status": solution.status.value,
                        "bound_ns": solution.lower_bound_ns,
                        "segments": [asdict(segment) for segment in solution.segments],
                        "wall_s": solution.wall_ns / 1e9,
                    }
                    print(key, {k: v for k, v in found[key].items() if k != "segments"}, flush=True)
    return found


def solved(solver: str, problem: Problem, time_limit_s: float) -> Solution:
    """Return a solver's plan; that of the least peak where none fits."""
    try:
        return SOLVERS[solver](problem, time_limit_s=time_limit_s)
    except BudgetTooSmallError as error:
        return error.solution


def compare(before: dict[str, dict], after: dict[str, dict]) -> None:
    """Print what differs."""
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            print(f"{key}: only {'after' if old is None else 'before'}")
            continue
        differing = [word for word in ("problem", "peak_bytes", "added_ns", "segments") if old[word] != new[word]]
        if differing:
            words = ", ".join(f"{word} {old[word]} -> {new[word]}" for word in ("peak_bytes", "added_ns"))
            print(f"{key}: {', '.join(differing)} differ: {words}")
    same = sum(before[key]["segments"] == after[key]["segments"] for key in before.keys() & after.keys())
    print(f"{same} of {len(before)} plans are the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--folder", type=Path, required=True)
    recording.add_argument("--models", nargs="+", choices=NAMES, default=list(MODELS))
    recording.add_argument("--scale", type=float, default=1.0, help="what to multiply batches by")
    planning = commands.add_parser("plan")
    planning.add_argument("--folder", type=Path, required=True)
    planning.add_argument("--out", type=Path, required=True)
    planning.add_argument("--solvers", nargs="+", choices=list(SOLVERS), default=[n for n in SOLVERS if n != "auto"])
    planning.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solve")
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", nargs=2, type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.folder, given.models, given.scale)
    elif given.command == "plan":
        given.out.write_text(json.dumps(plans(given.folder, given.solvers, given.time_limit)))
    else:
        compare(*(json.loads(file.read_text()) for file in given.files))


if __name__ == "__main__":
    main()
