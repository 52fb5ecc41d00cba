"""Trainers that plan at their first batch train as they do without: the same curves, weights and files."""

import logging
import random
import re
import warnings

import lightning
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from remat.integrations import accelerate as with_accelerate
from remat.integrations import plan_once
from remat.integrations.device_budget import device_budget
from remat.integrations.first_batch import FirstPlan, _shapes
from remat.integrations.kept_plans import KeptPlans
from remat.integrations.lightning import PlanCallback as LightningPlan
from remat.integrations.transformers import PlanCallback as TransformersPlan
from remat.integrations.transformers import returned_loss
from remat.planner import ApplyError, BudgetError, InfeasibleBudgetError, Plan, PlanError
from remat.planner.applier.apply import applied_to
from remat.planner.finding.planner import Planner
from remat.profiler.devices import Device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from .audit import differences, picture

# Planning a tiny step; nobody looks at times here. Where what planning runs may leave traces, steps are timed for real.
QUICK = {"solver": "dp", "repeats": 0}
TIMED = {"solver": "dp", "repeats": 1}


@pytest.fixture(autouse=True)
def accelerate_as_at_first():
    """Have accelerate forget the precision of an earlier test, which it keeps for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)


TRAINERS = []
"""What trains now, with all that it holds: models, optimizers, schedules, arguments, callbacks."""


@pytest.fixture(autouse=True)
def planning_leaves_the_trainer_as_it_was(monkeypatch):
    make = FirstPlan.make

    def audited(self, model, batch, **known):
        before = picture(model, batch, known, TRAINERS)
        made = make(self, model, batch, **known)
        assert differences(before, picture(model, batch, known, TRAINERS)) == []
        return made

    monkeypatch.setattr(FirstPlan, "make", audited)
    yield
    TRAINERS.clear()


@pytest.fixture
def planned_times(monkeypatch):
    """Count the plans that are made."""
    made = []
    plan = Planner.plan

    def counted(self, *args, **kwargs):
        made.append(args)
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(Planner, "plan", counted)
    return made


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=64, **ids))


class Generates(TrainerCallback):
    """Generate after the second step, in the midst of training."""

    def __init__(self):
        self.words = []

    def on_step_end(self, args, state, control, model=None, **others):
        if state.global_step == 2:
            model.eval()
            prompt = torch.tensor([[1, 2, 3]])
            self.words.append(model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())
            model.train()


def train(folder, *callbacks, model=None, resume=None, **arguments) -> tuple[list, nn.Module]:
    model = model or gpt2()
    tokens = torch.randint(64, (24, 64), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        **arguments,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[*callbacks],
    )
    TRAINERS.append(trainer)
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch")
    log = [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]
    return log, model


def same_values(ours: nn.Module, theirs: nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 2, "bf16": True, "save_strategy": "no", "max_steps": 3}],
    ids=["plain", "bfloat16 and accumulation"],
)
def test_a_trainer_with_a_plan_trains_as_without(tmp_path, planned_times, arguments):
    callback, words = TransformersPlan("70%", **TIMED), (Generates(), Generates())
    plain_log, plain = train(tmp_path / "plain", words[0], **arguments)
    log, model = train(tmp_path / "planned", words[1], callback, **arguments)
    assert log == plain_log
    assert len(log) > 4
    assert same_values(model, plain)
    assert words[0].words == words[1].words != []
    assert model.config.to_dict() == plain.config.to_dict()
    assert type(vars(model).get("forward")) is type(vars(plain).get("forward"))
    assert callback.plan.segments
    assert len(planned_times) == 1
    known = callback.plan.circumstances
    assert known.optimizer == "AdamW"
    assert known.optimizer_bytes >= 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert known.accumulation is ("gradient_accumulation_steps" in arguments)
    assert known.autocast == ({"cpu": "bfloat16"} if "bf16" in arguments else {})


def test_a_trainer_trains_as_without_under_a_plan_that_treats_blocks_alike(tmp_path):
    callback = TransformersPlan("80%", alike=True, **QUICK)
    plain_log, plain = train(tmp_path / "plain", max_steps=2)
    log, model = train(tmp_path / "planned", callback, max_steps=2)
    assert log == plain_log
    assert same_values(model, plain)
    assert callback.plan.segments
    assert callback.plan.circumstances.alike
    assert any("in 2 blocks alike, transformer.h.0 to transformer.h.1" in note for note in callback.plan.notes)
    with pytest.raises(BudgetError, match="cannot treat blocks alike: choose one of"):
        TransformersPlan("80%", alike=True, solver="sqrt")


def test_a_trainer_resumes_from_its_checkpoint_with_the_kept_plan(tmp_path, planned_times):
    # A schedule that knows no end: two steps are then the first half of four.
    constant = {"lr_scheduler_type": "constant"}
    plain_log, plain = train(tmp_path / "plain", **constant)
    train(tmp_path / "planned", TransformersPlan("70%", **QUICK), max_steps=2, **constant)
    saved, resumed = tmp_path / "planned" / "checkpoint-2", TransformersPlan("70%", **QUICK)
    assert {path.name for path in saved.iterdir()} == {
        path.name for path in (tmp_path / "plain/checkpoint-2").iterdir()
    }
    log, model = train(tmp_path / "planned", resumed, resume=str(saved), **constant)
    assert [entry["loss"] for entry in log if "loss" in entry] == [e["loss"] for e in plain_log if "loss" in e]
    assert same_values(model, plain)
    assert resumed.plan.segments
    assert len(planned_times) == len(list((tmp_path / "planned/remat").glob("plan-*.json"))) == 1


def test_a_plan_is_kept_for_just_what_it_was_made_for(tmp_path):
    batch = torch.randn(64, 16)

    def path(model=None, batch=batch, **asked):
        kept = KeptPlans(tmp_path, {"budget": "80%", "loss": blocks, **asked}, model or blocks(), batch)
        kept.keep(Plan(segments=()))
        assert kept.find() == Plan(segments=())
        return {file.name for file in tmp_path.iterdir()}

    assert path() == path(batch=batch * 2)
    model = blocks()
    model[0][2].p = 0.5
    with torch.autocast("cpu"):
        path()
    path(model)
    path(batch=batch[:32])
    path(budget="90%")
    path(loss=None)
    path(alike=True)
    assert len(path()) == 7


def test_a_kept_plan_that_is_too_large_by_now_is_made_again(tmp_path, planned_times, monkeypatch):
    model, batch = blocks(), torch.randn(256, 16)
    plan_once(model, batch, "auto", folder=tmp_path, **QUICK).remove()
    plan_once(model, batch, "auto", folder=tmp_path, **QUICK).remove()
    assert len(planned_times) == 1
    unplanned = plan_once(model, batch, "auto", folder=tmp_path, **QUICK)
    (kept,) = tmp_path.iterdir()
    limit = int(0.8 * Plan.load(kept).unplanned_peak_bytes)
    unplanned.remove()
    monkeypatch.setattr("remat.integrations.first_batch.device_budget", lambda *facts: limit)
    plan_once(model, batch, "auto", folder=tmp_path, **QUICK)
    assert Plan.load(kept).predicted_peak_bytes <= limit
    assert len(planned_times) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"activation_checkpointing": True},
            r"activation_checkpointing=True \(or gradient_checkpointing=True, its older name\).*leave it out",
        ),
        ({"use_cache": True}, "use_cache=True makes a key-value cache"),
    ],
)
def test_a_trainer_that_plans_do_not_go_with_is_refused_before_it_trains(tmp_path, arguments, words):
    with pytest.raises(ApplyError, match=words):
        train(tmp_path, TransformersPlan("70%"), **arguments)


def test_a_trainer_that_smooths_labels_trains_as_without(tmp_path, planned_times):
    plain, model = train(tmp_path / "plain", label_smoothing_factor=0.1)
    planned, planned_model = train(tmp_path / "planned", TransformersPlan("70%", **QUICK), label_smoothing_factor=0.1)
    assert len(planned_times) == 1
    assert planned == plain
    assert same_values(planned_model, model)


def test_a_loss_from_outside_the_model_is_asked_for():
    with pytest.raises(ValueError, match=r"computes it outside \(compute_loss_func\): give PlanCallback a loss="):
        returned_loss({"logits": torch.ones(2, 3)})


def test_a_misspelt_keyword_is_told_when_the_callback_is_made():
    with pytest.raises(TypeError, match=r"'acumulation'.*accumulation"):
        TransformersPlan("70%", acumulation=True)
    with pytest.raises(TypeError, match="'sovler': did you mean 'solver'"):
        TransformersPlan("70%", sovler="dp")
    with pytest.raises(BudgetError, match="unknown solver 'dq'"):
        LightningPlan("70%", solver="dq")
    with pytest.raises(BudgetError, match=r'a share is written "70%"'):
        LightningPlan(0.7)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(4)]
    )


class Regression(lightning.LightningModule):
    """Calls two of its parts directly, one of them twice, logs, counts and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.body, self.head = blocks(), nn.Linear(16, 1)
        self.seen, self.count = [], 0

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.head(self.body(self.body(inputs))) - targets).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(float(loss.detach()) if not hasattr(loss, "fake_mode") else None)
        self.count += 1
        return {"loss": loss, "size": len(inputs)}

    def validation_step(self, batch, batch_idx):
        self.log("validated", (self.head(self.body(batch[0])) - batch[1]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Curve(lightning.Callback):
    def __init__(self):
        self.points = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.points.append((outputs["loss"].item(), dict(trainer.logged_metrics), torch.get_rng_state().sum().item()))


def fit(folder, *callbacks, resume=None, module=None, **arguments):
    lightning.seed_everything(0, verbose=False)
    module, curve = module or Regression(), Curve()
    inputs, targets = torch.randn(256, 16), torch.randn(256, 1)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve, *callbacks],
        **{"max_epochs": 2, "enable_checkpointing": False, **arguments},
    )
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)
    TRAINERS.append(trainer)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return curve.points, module


# Lightning 2.6 calls a part of torch's pytree that torch 2.13 announces to change, and advises on loaders.
lightning_warns = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


class TestLightning:
    pytestmark = lightning_warns

    @pytest.mark.parametrize("arguments", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}])
    def test_a_module_with_a_plan_trains_as_without(self, tmp_path, planned_times, arguments):
        callback = LightningPlan("75%", **TIMED)
        plain_curve, plain = fit(tmp_path, **arguments)
        assert len(plain_curve) == 8
        curve, module = fit(tmp_path, callback, **arguments)
        assert curve == plain_curve
        assert same_values(module, plain)
        assert (module.seen, module.count) == (plain.seen, plain.count)
        assert "training_step" not in vars(module)
        assert applied_to(module) is None
        assert callback.plan.segments
        assert len(planned_times) == 1
        # Lightning frees gradients behind training_step's forward, whether they accumulate or not.
        assert callback.plan.circumstances.accumulation
        assert callback.plan.circumstances.autocast == ({"cpu": "bfloat16"} if arguments else {})
        # Both passes through the body are one step's, so a call of the second is known as that.
        assert {call.index for segment in callback.plan.segments for call in segment.members} <= {0, 1}
        assert "body#1" in callback.plan.fingerprint.calls or callback.plan.fingerprint.calls.count("body") == 2

    def test_a_module_resumes_from_a_checkpoint_with_the_kept_plan(self, tmp_path, planned_times):
        def saves():
            return lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", save_top_k=-1)

        arguments = {"enable_checkpointing": True}
        fit(tmp_path, LightningPlan("75%", **QUICK), saves(), max_epochs=1, **arguments)
        (saved,) = (tmp_path / "saved").iterdir()
        plain_curve, plain = fit(tmp_path, saves(), resume=saved, **arguments)
        curve, module = fit(tmp_path, saves(), LightningPlan("75%", **QUICK), resume=saved, **arguments)
        assert len(curve) == 4
        assert curve == plain_curve
        assert same_values(module, plain)
        assert torch.load(saved, weights_only=False)["state_dict"].keys() == plain.state_dict().keys()
        assert len(planned_times) == 1

    def test_manual_optimisation_is_refused(self, tmp_path):
        module = Regression()
        module.automatic_optimization = False
        with pytest.raises(ApplyError, match="training_step runs backward itself"):
            fit(tmp_path, LightningPlan("75%"), module=module)


def accumulate(budget=None):
    model = blocks()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, schedule = accelerator.prepare(model, bare, torch.optim.lr_scheduler.StepLR(bare, 1))
    TRAINERS.append((accelerator, optimizer, schedule))
    losses = []
    for number in range(4):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
        if budget:
            with_accelerate.plan_once(
                accelerator, model, inputs, budget, loss=lambda out: out.square().mean(), optimizer=optimizer, **QUICK
            )
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, applied_to(model)


def test_a_loop_with_accelerate_and_a_plan_trains_as_without(planned_times):
    torch.manual_seed(5)
    plain_losses, plain, _ = accumulate()
    torch.manual_seed(5)
    losses, model, applied = accumulate("80%")
    assert losses == plain_losses
    assert same_values(model, plain)
    assert applied is not None
    assert len(planned_times) == 1


def test_in_training_the_first_batch_longer_than_planned_is_told_once():
    model = gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for rows, length in ((4, 32), (2, 32), (4, 16), (4, 48), (4, 64)):
        ids = torch.randint(64, (rows, length))
        batch = {"input_ids": ids, "labels": ids}
        plan_once(model, batch, "70%", optimizer=optimizer, **QUICK)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told += [(length, str(warning.message)) for warning in caught]
    assert [length for length, _ in told] == [48]
    assert "'input_ids' of shape [4, 48], larger than planned ([4, 32])" in told[0][1]


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_automatic_is_what_the_device_has_free_less_the_reserve(monkeypatch):
    model, batch = blocks(), torch.randn(64, 16)
    own = sum(parameter.nbytes for parameter in model.parameters()) + batch.nbytes
    monkeypatch.setattr(Device, "free_bytes", lambda device: 1000)
    assert device_budget(model, batch, None, "10%") == 900 + own
    assert device_budget(model, batch, None, 300) == 700 + own
    with pytest.raises(BudgetError, match="leaves nothing: pass a smaller reserve"):
        device_budget(model, batch, None, "100%")
    before = states()
    # So little that no plan fits: the step would not have either.
    with pytest.raises(InfeasibleBudgetError, match="no plan fits"):
        plan_once(model, batch, "auto", repeats=0)
    monkeypatch.undo()
    applied = plan_once(model, batch, "auto", **QUICK)
    assert plan_once(model, batch, "auto") is applied
    assert states() == before


def test_what_planning_does_is_logged_once_and_a_kept_plan_is_named(tmp_path, caplog):
    model, batch, heard = blocks(), torch.randn(64, 16), []
    known = {"folder": tmp_path, "progress": heard.append, **QUICK}
    with caplog.at_level(logging.INFO, logger="remat"):
        plan_once(model, batch, "80%", **known)
        plan_once(model, batch, "80%", **known).remove()
        records = [record for record in caplog.records if record.name == "remat"]
        told = [record.getMessage() for record in records]
        assert [record.levelname == "WARNING" for record in records] == [True, *[False] * (len(told) - 2), True]
        caplog.clear()
        plan_once(model, batch, "80%", **known)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert told[0].startswith("remat: planning at the first batch, which runs some steps")
    assert told[0].endswith(f": {count:,} parameters, batch float32 [64, 16], budget 80%")
    assert _shapes({"input_ids": torch.ones(4, 8), "more": [torch.ones(2)]}) == (
        "input_ids float32 [4, 8], more float32 [2]"
    )
    assert told[1:-1] == [f"planning: {words}" for words in heard] != []
    assert re.match(r"remat: planned in \d+\.\d s: <plan: \d+ segments?, peak .* added time ", told[-1])
    (kept,) = (record.getMessage() for record in caplog.records if record.name == "remat")
    (file,) = tmp_path.iterdir()
    assert kept.startswith(f"training under a plan that was kept in {file}: <plan: ")
    file.write_text("{")
    applied_to(model).remove()
    caplog.clear()
    plan_once(model, batch, "80%", **known)
    assert (
        caplog.records[0].getMessage().startswith(f"remat: the plan kept in {file} cannot be read, and is made anew: ")
    )


def test_a_callback_says_what_was_asked_and_what_came_of_it(tmp_path):
    callbacks = TransformersPlan("70%", **QUICK), LightningPlan("70%", **QUICK)
    assert {repr(callback) for callback in callbacks} == {"<PlanCallback: budget '70%', waits for the first batch>"}
    callbacks[0].plan = Plan(segments=(), predicted_peak_bytes=2**20)
    assert repr(callbacks[0]).startswith("<PlanCallback: budget '70%', plan: 0 segments, peak 1.0 MiB")


def test_a_sharded_model_is_refused_with_what_to_do():
    model = blocks()
    model[0][0].weight.device_mesh = object()
    with pytest.raises(PlanError, match=r"'0\.0\.weight' is already sharded.*plan before training"):
        plan_once(model, torch.randn(64, 16), "80%")
