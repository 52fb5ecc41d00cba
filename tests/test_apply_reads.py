"""A replay is compared with forward in what its code can read, and in nothing else."""

import functools
import types

import pytest
import torch
import transformers
from remat.planner import ReplayStateError
from remat.planner.applier.apply import apply_segments
from remat.planner.applier.reads import Reads
from torch import nn

from tests.apply_models import assert_exact, assert_same, segment, train_step


class Base(nn.Module):
    """Reads its scale in many ways, and carries a count that it never reads."""

    def __init__(self, way="plain"):
        super().__init__()
        self.linear, self.way = nn.Linear(16, 16), way
        self.scale, self.count, self.last = 2.0, 0, None
        self.config = types.SimpleNamespace(scale=3.0, kind=None, steps=0)
        self.register_buffer("seen", torch.zeros(()))

    def tick(self):
        self.count += 1
        self.seen += 1
        self.config.steps += 1
        self.last = torch.ones(1)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * READERS[self.way](self) * self.config.scale


class Helper:
    def __init__(self, module):
        self.module = module

    def value(self):
        return self.module.scale


def helper_function(module):
    return nested_function(module)


def nested_function(module):
    return getattr(module, "scale", 1.0)


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@decorated
def behind_a_decorator(module):
    return module.scale


READERS = {
    "plain": lambda module: module.scale,
    "function": helper_function,
    "decorated": behind_a_decorator,
    "partial": functools.partial(lambda module, factor: module.scale * factor, factor=1.0),
    "object": lambda module: Helper(module).value(),
    "comprehension": lambda module: sum(m.scale for m in [module]),
    "made": lambda module: getattr(module, "".join(["sc", "ale"])),
    "dictionary": lambda module: vars(module)["scale"],
}


@pytest.mark.parametrize("way", READERS)
@pytest.mark.parametrize("plan", [[segment("0")], [segment("0", "1")]], ids=["one call", "a run"])
def test_an_attribute_that_the_code_reads_however_far_away_is_told_when_it_changes(way, plan):
    model, x = nn.Sequential(Base(way), Base(way)).train(), torch.randn(4, 16)
    with apply_segments(model, plan):
        loss = model(x).sum()
        model[0].scale = 5.0
        with pytest.raises(ReplayStateError, match=r"'0\.scale' is 5\.0, 2\.0 in forward"):
            loss.backward()


@pytest.mark.parametrize("plan", [[segment("0")], [segment("0", "1")]], ids=["one call", "a run"])
def test_what_no_code_of_the_segment_reads_may_change(plan, monkeypatch):
    for way in ("made", "dictionary"):
        monkeypatch.delitem(READERS, way)
    model, x = nn.Sequential(Base(), Base()).train(), torch.randn(4, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with apply_segments(model, plan):
        loss = model(x).sum()
        for block in model:
            block.tick()
            block.config.kind = "single"
        found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class MakesItsMask(nn.Module):
    """Makes things at first use: in an attribute, in a new one, in a buffer, in a table of its file."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask, self.table = nn.Linear(16, 16), None, {}
        self.register_buffer("gate", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(16).cumsum(0)
        if not hasattr(self, "positions"):
            self.positions = torch.arange(16.0).sin()
        if self.gate is None:
            self.gate = torch.ones(16).cos()
        if len(x) not in self.table:
            self.table[len(x)] = torch.ones(16).sinh()
        if len(x) not in TABLE:
            TABLE[len(x)] = torch.ones(16).exp()
        return torch.tanh(self.linear(x) * self.mask + self.positions * self.gate) * self.table[len(x)] * TABLE[len(x)]


TABLE = {}


@pytest.mark.parametrize("plan", [[segment("0")], [segment("0", "1")], [segment("0", "1", children=(segment("1"),))]])
def test_what_a_block_makes_at_its_first_use_is_no_difference(plan):
    TABLE.clear()
    torch.manual_seed(0)
    assert_exact(nn.Sequential(MakesItsMask(), MakesItsMask()).train(), torch.randn(4, 16), plan)


@pytest.mark.parametrize("name", ["mask", "positions", "gate"])
def test_what_a_block_made_at_its_first_use_is_told_when_it_is_replaced(name):
    model, x = nn.Sequential(MakesItsMask(), MakesItsMask()).train(), torch.randn(4, 16)
    with apply_segments(model, [segment("0")]):
        loss = model(x).sum()
        setattr(model[0], name, torch.zeros(16))
        with pytest.raises(ReplayStateError, match=rf"'0\.{name}' is"):
            loss.backward()


def test_a_fresh_sequence_classifier_trains_exactly_where_its_head_notes_the_problem_on_the_shared_config():
    def fresh():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=2, vocab_size=50
        )
        return transformers.BertForSequenceClassification(config).train()

    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.tensor([0, 1])}

    def gradients(model):
        torch.manual_seed(1)
        model.zero_grad()
        model(**batch).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain, planned = fresh(), fresh()
    assert planned.config.problem_type is None
    with apply_segments(planned, [segment("bert.encoder.layer.0", "bert.encoder.layer.1")]):
        for _ in range(2):
            assert all(map(torch.equal, gradients(planned), gradients(plain)))
        loss = planned(**batch).loss
        planned.bert.encoder.layer[0].attention.self.config._attn_implementation = "eager"
        with pytest.raises(ReplayStateError, match=r"_attn_implementation.*reads that"):
            loss.backward()


@pytest.mark.parametrize("config", ["BertConfig", "GPT2Config", "LlamaConfig", "T5Config", "ViTConfig"])
def test_the_code_of_common_blocks_can_be_followed_to_its_end(config):
    settings = getattr(transformers, config)()
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"):
        if hasattr(settings, name):
            setattr(settings, name, 1)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(settings)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    reads = Reads.of(list(lists[0][0].modules()))
    assert not reads.everything
    assert "problem_type" not in reads.names


def test_a_logged_value_that_forward_writes_and_never_reads_is_no_difference():
    class Logs(nn.Linear):
        def forward(self, x):
            self.logged = float(x.detach().norm())
            return torch.tanh(super().forward(x))

    model, x = nn.Sequential(Logs(16, 16), Logs(16, 16)).train(), torch.randn(4, 16, requires_grad=True)
    plain = train_step(model, x)
    with apply_segments(model, [segment("0"), segment("1")]):
        assert_same(train_step(model, x), plain)
        first = model(x).sum()
        (first + model(2 * x).sum()).backward()


def test_reading_every_attribute_at_once_counts_all_of_them():
    class Whole(Base):
        def forward(self, x):
            return self.linear(x) * len([value for value in self.__dict__.values() if value == 0])

    model, x = nn.Sequential(Whole(), Whole()).train(), torch.randn(4, 16)
    with apply_segments(model, [segment("0")]):
        loss = model(x).sum()
        model[0].count = 1
        with pytest.raises(ReplayStateError, match=r"'0\.count' is 1, 0 in forward"):
            loss.backward()
