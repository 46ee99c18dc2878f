"""Mixers of users: registered in a module of their own, and known to every command, to workers and to from_pretrained."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from fastweights import plugins
from fastweights.cli import main
from fastweights.layers import (
    MIXERS,
    DeltaNet,
    LayerCache,
    MemoryLayer,
    Mixer,
    build_mixer,
    import_mixers,
    register_mixer,
    registry,
)
from fastweights.layers.posterior import PosteriorOptions
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.ops import palimpsa
from fastweights.testing import check_mixer
from fastweights.training import RecallExperiment
from fastweights.training.recall.folder import ExperimentFolder
from fastweights.training.recall.train import train_run

MODULE = '''
import torch
from fastweights.layers import DeltaNet, Mixer, register_mixer

ABOUT = {"equation": "m = rate m + W x", "source": "a test", "state": "H K"}

@register_mixer("average", summary="running average", **ABOUT)
class Average(Mixer):
    """A running average of a projection."""

    def __init__(self, *, hidden_size, num_heads, rate=0.5):
        super().__init__()
        self.hidden_size, self.rate = hidden_size, rate
        self.proj = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD, cache=None, cu_seqlens=None):
        edges = [0, x_BTD.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        w, outputs, finals = self.proj(x_BTD), [], []
        before = None if cache is None else cache.memory.get("m")
        for n, (a, b) in enumerate(zip(edges, edges[1:])):
            m = w.new_zeros(len(w), w.shape[2]) if before is None else before
            m = m if cu_seqlens is None or before is None else m[n : n + 1]
            for t in range(a, b):
                m = self.rate * m + w[:, t]
                outputs.append(m)
            finals.append(m)
        if cache is not None:
            cache.update({"m": torch.cat(finals)}, {})
        return torch.stack(outputs, 1)

    def state_size(self, length=1):
        return self.hidden_size

register_mixer("fast-average", layer=Average, options={"rate": 0.1}, summary="short average", **ABOUT)
'''
RUN = """
length = 32
batch_size = 2
max_steps = 2
log_every = 1
evaluation_rows = 2
context_lengths = [16]
cache = "cache"
output = "out"
[model]
hidden_size = 16
num_hidden_layers = 3
num_heads = 2
mixer = ["average", "gdn", {name = "fast-average", rate = 0.2}]
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
RECALL = (
    "recall --mixers average --task mqar-shuffled --pairs 2 --vocab-size 16 --width 8 --heads 2 --steps 3 --batch-size 2 "
    "--test-examples 2 --learning-rates 0.01 --workers 1 --output recall"
)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """The registry and the imported modules as they were, after the test and, when called, within it."""
    specs, modules, path = dict(registry._REGISTRY.specs), set(sys.modules), list(sys.path)

    def restore():
        registry._REGISTRY.specs.clear()
        registry._REGISTRY.specs.update(specs)
        for name in set(sys.modules) - modules:
            if name.startswith(("fastweights_import_", "my_")):
                del sys.modules[name]
        sys.path[:] = path

    yield restore
    restore()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_mixers.py").write_text(MODULE)
    return tmp_path


def test_a_user_mixer_is_like_any_other(folder):
    import_mixers(["my_mixers.py"])
    assert list(MIXERS)[-2:] == ["average", "fast-average"] and list(MIXERS)[0] == "softmax"
    torch.manual_seed(0)
    check_mixer(build_mixer("fast-average", hidden_size=8, num_heads=2).double())
    assert build_mixer("fast-average", hidden_size=8, num_heads=2).rate == 0.1
    with pytest.raises(
        ValueError, match=r"layer 0: mixer 'average' has no option 'rat' \(did you mean 'rate'\?\); it has"
    ):
        build_mixer("average", hidden_size=8, num_heads=2, rat=1)
    layer = MIXERS["average"].layer
    import_mixers(["my_mixers.py"])  # a second time changes nothing
    assert MIXERS["average"].layer is layer


def test_save_and_load(folder, forget):
    import_mixers(["my_mixers"])
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "num_hidden_layers": 2}
    lm = FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixer=["gdn", {"name": "average", "rate": 0.25}])).eval()
    lm.save_pretrained(folder / "model")
    forget()
    with pytest.raises(ValueError, match="unknown mixer 'average'.*--import MODULE"):
        FastWeightsForCausalLM.from_pretrained(folder / "model")
    import_mixers(["my_mixers"])
    loaded = FastWeightsForCausalLM.from_pretrained(folder / "model")
    tokens = torch.arange(9)[None]
    assert loaded.model.layers[1].mixer.rate == 0.25
    assert torch.equal(loaded(tokens).logits, lm(tokens).logits)


@pytest.mark.slow
def test_text_commands(folder, forget, capsys):
    (folder / "run.toml").write_text(RUN)
    (folder / "text.txt").write_text("".join(f"A line of text, number {number}.\n" for number in range(300)))

    def command(*words, code=0):
        forget()
        assert main([*words, "--import", "my_mixers.py"]) == code, capsys.readouterr().err
        return capsys.readouterr()

    command("train", "run.toml", "--stop-at", "1")
    forget()
    assert main(["train", "run.toml"]) == 2 and "unknown mixer 'average'" in capsys.readouterr().err
    assert "continues after step 1" in command("train", "run.toml").err
    assert command("generate", "out", "A line", "--max-new-tokens", "3").out
    assert "Results" in command("evaluate", "out", "--lengths", "16", "--texts", "1", "--stretch", "8").out
    assert "gdn -> pgdn in 1 of 3 layers: 1" in command("convert", "out", "--to", "pgdn", "--output", "new").out
    loaded = FastWeightsForCausalLM.from_pretrained(folder / "new")
    assert [name for name, _ in loaded.config.mixers()] == ["average", "pgdn", "fast-average"]


@pytest.mark.slow
def test_recall_in_workers_and_after_an_interruption(folder, forget, capsys):
    assert main(RECALL.split()) == 2 and "unknown mixer 'average'" in capsys.readouterr().err
    import_mixers(["my_mixers.py"])
    experiment = RecallExperiment(
        mixers=("average",), pairs=(2,), vocab_size=16, width=8, heads=2, steps=3, batch_size=2, test_examples=2,
        learning_rates=(0.01,), block="matched",
    )  # fmt: skip
    output, (run,) = ExperimentFolder(folder / "recall"), experiment.runs()
    with output.opened(experiment, overwrite=False):
        stops = iter([False, True])
        assert train_run(run, output.checkpoint(run), should_stop=lambda: next(stops)) is None
    assert output.checkpoint(run).exists()
    forget()
    assert main([*RECALL.split(), "--import", "my_mixers.py"]) == 0
    (result,) = json.loads((folder / "recall" / "results.json").read_text())["runs"]
    assert result["run"]["mixer"] == "average" and result["stopped_at"] == 3
    assert result["loss_steps"] == [1, 2, 3] and "average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("my_absent", ["cannot import my_absent: there is no such module"]),
        ("my_absent.py", ["cannot import my_absent.py: there is no such file"]),
        ("my_broken.py", ["cannot import my_broken.py: ZeroDivisionError: division by zero"]),
    ],
)
def test_modules_that_cannot_be_imported(folder, capsys, module, words):
    (folder / "my_broken.py").write_text("1 / 0\n")
    assert main(["recall", "--list", "--import", module]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and all(word in printed.err for word in words)


def test_the_list_shows_them(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["recall", "--list", "--import", "my_mixers"]) == 0
    assert "running average" in capsys.readouterr().out


def test_plugins_load_once_when_asked_for_and_a_broken_one_is_named(folder, monkeypatch):
    loaded = []

    def plugin(name, load):
        return SimpleNamespace(name=name, value=f"package.{name}", load=load)

    def good():
        loaded.append("good")
        import_mixers(["my_mixers.py"])

    def broken():
        loaded.append("broken")
        raise RuntimeError("no\nluck")

    found = [plugin("bad", broken), plugin("good", good)]
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "fastweights.mixers" else [])
    build_mixer("gdn", hidden_size=8, num_heads=2)
    assert loaded == []
    with pytest.warns(UserWarning, match=r"^plug-in bad \(package.bad\) does not load: RuntimeError: no luck$"):
        build_mixer("average", hidden_size=8, num_heads=2)
    assert "fast-average" in list(MIXERS) and loaded == ["broken", "good"]


ABOUT = {"summary": "s", "equation": "e", "source": "p", "state": "H K V"}


def test_decorator_and_call_give_the_layer_back():
    class Mine(DeltaNet):
        """A layer."""

    assert register_mixer("mine", options={"decay": "head"}, **ABOUT)(Mine) is Mine
    assert register_mixer("mine-too", layer=Mine, **ABOUT) is Mine
    assert MIXERS["mine"].options == {"decay": "head"} and MIXERS["mine-too"].options == {}
    assert build_mixer("mine", hidden_size=8, num_heads=2).decay is not None
    assert register_mixer("mine", layer=Mine, **ABOUT) is Mine  # defined again, as in a notebook
    assert MIXERS["mine"].options == {}


class NoHeads(Mixer):
    def __init__(self, hidden_size):
        super().__init__()


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        (
            "gdn",
            {"layer": NoHeads},
            ValueError,
            "mixer 'gdn' is taken by fastweights.layers.delta_net.DeltaNet; choose",
        ),
        (
            "mine",
            {"layer": torch.nn.Linear},
            TypeError,
            "layer of mixer 'mine' must be a subclass of .*Mixer, got .*Linear",
        ),
        (
            "mine",
            {"layer": DeltaNet, "options": {"decya": 1}},
            ValueError,
            r"no option 'decya' \(did you mean 'decay'\?\)",
        ),
        ("mine", {"layer": DeltaNet, "options": {"hidden_size": 1}}, ValueError, "no option 'hidden_size'"),
        ("mine", {"layer": NoHeads}, TypeError, "constructor of NoHeads must take num_heads as a keyword"),
        ("my mixer", {"layer": DeltaNet}, ValueError, "name must be of letters, digits.*got 'my mixer'"),
        (3, {"layer": DeltaNet}, TypeError, "name must be the name of a mixer, got 3"),
        ("mine", {"layer": DeltaNet, "summary": ""}, ValueError, "summary must be"),
    ],
)
def test_wrong_registrations_are_refused(name, changes, error, message):
    before = dict(registry._REGISTRY.specs)
    with pytest.raises(error, match=message):
        register_mixer(name, **{**ABOUT, **changes})
    assert registry._REGISTRY.specs == before


def test_constructors_show_and_check_their_options():
    parameters = inspect.signature(DeltaNet).parameters
    assert list(parameters)[:3] == ["hidden_size", "num_heads", "head_dim"] and parameters["decay"].default == "none"
    assert parameters["hidden_size"].default is inspect.Parameter.empty
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    with pytest.raises(
        TypeError, match=r"DeltaNet has no option 'decya' \(did you mean 'decay'\?\); it has hidden_size"
    ):
        DeltaNet(hidden_size=8, num_heads=2, decya="head")
    with pytest.raises(TypeError, match="DeltaNet needs num_heads"):
        DeltaNet(hidden_size=8)
    layer = DeltaNet(hidden_size=8, num_heads=2, decay="head")
    assert layer.options.decay == "head" and layer.options.expand_v == 1.0
    with pytest.raises(AttributeError):
        layer.options.decay = "none"


def documented(text):
    return (
        set() if "Args:" not in text else {line.split(":")[0].strip() for line in text.split("Args:")[1].splitlines()}
    )


SHARED = [f"fastweights.layers.{module}" for module in ("options", "preconditioner")]


@pytest.mark.parametrize("layer", sorted({spec.layer for spec in MIXERS.values()}, key=lambda layer: layer.__name__))
def test_every_option_is_documented(layer):
    """A layer's own options and the defaults that it replaces in its docstring, common ones in that of the shared class."""
    own, shared = documented(inspect.getdoc(layer)), set()
    defaults = {}
    for options in reversed(layer.Options.__mro__):
        if options.__module__ in SHARED or options is PosteriorOptions:
            shared |= documented(inspect.getdoc(options))
            defaults |= {name: p.default for name, p in inspect.signature(options).parameters.items()}
            assert set(inspect.signature(options).parameters) <= shared
    for name, parameter in layer.__signature__.parameters.items():
        assert name in own or name in shared and parameter.default == defaults[name], name


def test_a_layer_names_its_op_once():
    """The names of the state, its size and its text come from the declaration of the op."""

    @register_mixer("twice", summary="two memories", equation="M, J", source="a test")
    class Twice(MemoryLayer):
        op = palimpsa

        def rule(self, x, q, k, v, run):
            g = -torch.ones_like(v[..., 0])
            return run(self.op, q, k, v, torch.ones_like(v), g)

    layer, cache = build_mixer("twice", hidden_size=8, num_heads=2, expand_v=2), LayerCache()
    layer(torch.randn(3, 5, 8), cache)
    assert MIXERS["twice"].state == "2 H K V" and layer.state_size() == 2 * 2 * 4 * 8
    assert {name: x.shape for name, x in cache.memory.items()} == dict.fromkeys("MJ", (3, 2, 4, 8))
    check_mixer(layer.double())


def test_a_given_state_comes_before_that_of_the_op():
    register_mixer(
        "gdn-and-more",
        layer=DeltaNet,
        options={"preconditioner": "key"},
        summary="s",
        equation="e",
        source="s",
        state="H K",
    )
    assert MIXERS["gdn-and-more"].state == "H K"


@pytest.mark.parametrize("base", [Mixer, MemoryLayer])
def test_a_layer_without_an_op_says_its_state(base):
    class Nameless(base):
        def __init__(self, *, hidden_size, num_heads):
            super().__init__()

    with pytest.raises(
        ValueError, match="state of mixer 'nameless' must be given, such as 'H K V': Nameless names no op"
    ):
        register_mixer("nameless", layer=Nameless, summary="s", equation="e", source="s")


def test_a_layer_that_names_no_op_has_no_size_of_its_own():
    class Nameless(MemoryLayer):
        pass

    with pytest.raises(
        NotImplementedError, match="Nameless must have the attribute op, or a method states or state_size"
    ):
        Nameless(hidden_size=8, num_heads=2).state_size()
