"""What prefixes are found by: equal while nothing changes, another for every change, and nothing is kept alive."""

import collections
import copy
import enum
import functools
import gc
import weakref

import pytest
import torch
from models import build, prompts, run

import hf_paged
from hf_paged.generation import identity
from hf_paged.generation.identity import OutOfReach, Walk

from .disturbances import TABLE, disturbed, middle, pair_of, seen_by_content
from .test_soundness import ONE

pytestmark = pytest.mark.filterwarnings("ignore")


def description(model):
    """Everything but the content of tensors."""
    return Walk(model).describe()[0]


def whole(model):
    return identity.begin(Walk(model)).finish()


class Carries(torch.nn.Module):
    """A module with whatever attribute."""

    def __init__(self, entry=None):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.entry = entry


# -- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_oss"])
def test_the_same_model_is_the_same_again(family):
    model = build(family)
    first = whole(model)
    run(model, prompts(5), max_new_tokens=2)
    model.requires_grad_(False)
    model.config.use_cache = False
    model.generation_config.temperature = 0.3
    assert whole(model) == first


def test_a_deep_copy_is_the_same_in_one_process():
    """Its weights are other tensors, its classes and functions the same objects."""
    model = build("llama")
    assert whole(copy.deepcopy(model)) == whole(model)


def test_a_model_built_again_is_the_same():
    assert whole(build("llama")) == whole(build("llama"))
    assert whole(build("llama")) != whole(build("llama", seed=1))


def test_unpatching_brings_the_same_back():
    model = build("llama")
    first = whole(model)
    assert whole(hf_paged.patch(model)) == whole(model)
    assert whole(hf_paged.unpatch(model)) == first


def test_a_copy_whose_attributes_hold_functions_made_for_it_is_another():
    """Functions count as objects, since two made from one code may have closed over unlike things."""

    def make(strength):
        return lambda x: x * strength

    assert description(Carries(make(1))) != description(Carries(make(1)))


@pytest.mark.parametrize("name", seen_by_content())
def test_what_is_put_back_is_the_same_again(name):
    _, model = pair_of(TABLE[name].base)
    first = whole(model)
    with disturbed(name, model):
        assert whole(model) != first
        assert whole(model) == whole(model)
    assert whole(model) == first or name == "an_adapter_is_deleted_and_added_under_its_name"


# -- unlike -----------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Holder:
    def __init__(self, **entries):
        self.__dict__.update(entries)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def one(x):
    return x


def other(x):
    return x


Pair = collections.namedtuple("Pair", "left right")
LINEAR = torch.nn.Linear(2, 2)

# A kind of attribute -> two values that are unlike.
KINDS = {
    "bool": (True, False),
    "int": (1, 2),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "float": (0.5, 0.25),
    "signed zero": (0.0, -0.0),
    "float in the last bit": (1.0, 1.0 + 2**-52),
    "str": ("a", "b"),
    "str and bytes": ("a", b"a"),
    "None": (None, 0),
    "complex": (1j, 2j),
    "list": ([1, 2], [2, 1]),
    "list and tuple": ([1, 2], (1, 2)),
    "shorter": ([1, 2], [1]),
    "set": ({1, 2}, {1, 3}),
    "frozenset": (frozenset((1,)), frozenset((2,))),
    "dict": ({"a": 1}, {"a": 2}),
    "dict's keys": ({"a": 1}, {"b": 1}),
    "dict's order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "dict of lists": ({"a": [1, [2]]}, {"a": [1, [3]]}),
    "ordered dict": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "dtype": (torch.float32, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("cpu", 0)),
    "size": (torch.Size([1]), torch.Size([2])),
    "slice": (slice(1), slice(2)),
    "range": (range(1), range(2)),
    "enum": (Colour.RED, Colour.BLUE),
    "int enum": (Level.LOW, Level.HIGH),
    "function": (one, other),
    "builtin": (torch.relu, torch.tanh),
    "class": (int, float),
    "partial": (functools.partial(one, 1), functools.partial(one, 2)),
    "partial's keywords": (functools.partial(one, x=1), functools.partial(one, x=2)),
    "named tuple": (Pair(1, 2), Pair(1, 3)),
    "object": (Holder(a=1), Holder(a=2)),
    "object's object": (Holder(a=Holder(b=1)), Holder(a=Holder(b=2))),
    "object with slots": (Slots(1), Slots(2)),
    "tensor's shape": (torch.zeros(2), torch.zeros(3)),
    "tensor's dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "tensor's content": (torch.zeros(2), torch.ones(2)),
    "tensor in a list": ([torch.zeros(2)], [torch.ones(2)]),
    "tensor in a dict": ({"a": torch.zeros(2)}, {"a": torch.ones(2)}),
    "tensor in an object": (Holder(a=torch.zeros(2)), Holder(a=torch.ones(2))),
    "module in a list": ([torch.nn.ReLU()], [torch.nn.SiLU()]),
    "module's number in a list": ([torch.nn.LeakyReLU(0.1)], [torch.nn.LeakyReLU(0.2)]),
    "numpy number": (torch.ones(1).numpy()[0], torch.zeros(1).numpy()[0]),
}


# What cannot be held weakly is another one each time: nothing is found, and nothing wrong.
NEVER_THE_SAME = ("object with slots",)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attribute_counts(kind):
    left, right = (Carries(entry) for entry in KINDS[kind])
    right.load_state_dict(left.state_dict())
    assert whole(left) != whole(right)
    assert (whole(left) == whole(left)) == (kind not in NEVER_THE_SAME)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attribute_is_read_when_it_changes_in_place(kind):
    module = Carries(Holder(value=KINDS[kind][0]))
    first = whole(module)
    module.entry.value = KINDS[kind][1]
    assert whole(module) != first
    module.entry.value = KINDS[kind][0]
    assert (whole(module) == first) == (kind not in NEVER_THE_SAME)


def changed(change):
    model = build("llama")
    before = whole(model)
    change(model)
    return whole(model) != before


# What is done to a model -> that.
CHANGES = {
    "an attribute comes": lambda model: setattr(middle(model), "extra", 1),
    "a buffer comes": lambda model: middle(model).register_buffer("extra", torch.zeros(1), persistent=False),
    "a child comes": lambda model: middle(model).add_module("extra", torch.nn.Identity()),
    "a child is renamed": lambda model: middle(model).add_module("other", middle(model)._modules.pop("mlp")),
    "a child is None": lambda model: middle(model)._modules.update(mlp=None),
    "a hook comes": lambda model: middle(model).register_forward_hook(lambda *a: None),
    "a pre-hook comes": lambda model: middle(model).register_forward_pre_hook(lambda *a: None),
    "a forward comes": lambda model: setattr(middle(model), "forward", one),
    "another class": lambda model: setattr(middle(model), "__class__", type("Sub", (type(middle(model)),), {})),
    "training mode": lambda model: model.train(),
    "training mode of one module": lambda model: middle(model).train(),
    "a config's field": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "a config's nested field": lambda model: model.config.rope_parameters.update(rope_theta=5.0),
    "a config's new field": lambda model: setattr(model.config, "strength", 3),
    "a module that is shared": lambda model: setattr(model.model.layers[1], "mlp", middle(model).mlp),
    "a weight that is tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "a weight's dtype": lambda model: middle(model).mlp.to(torch.bfloat16),
    "a weight's stride": lambda model: setattr(
        middle(model).mlp.up_proj.weight, "data", middle(model).mlp.up_proj.weight.data.t().contiguous().t()
    ),
    "what a weight carries": lambda model: setattr(middle(model).mlp.up_proj.weight, "scale", 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_to_a_model_counts(name):
    assert changed(CHANGES[name])


HARMLESS = {
    "requires_grad": lambda model: model.requires_grad_(False),
    "gradients": lambda model: setattr(model.lm_head.weight, "grad", torch.ones_like(model.lm_head.weight)),
    "generation config": lambda model: setattr(model.generation_config, "num_beams", 3),
    "use_cache": lambda model: setattr(model.config, "use_cache", False),
    "the name": lambda model: setattr(model.config, "_name_or_path", "elsewhere"),
    "other memory": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "a state dict of the same": lambda model: model.load_state_dict(model.state_dict()),
    "backward hooks": lambda model: model.register_full_backward_hook(lambda *a: None),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_forward_does_not_count(name):
    assert not changed(HARMLESS[name])


# -- depth and cycles -------------------------------------------------------------------------------------------------


def test_an_attribute_that_points_to_its_parent_or_itself_ends():
    module = Carries()
    module.__dict__["parent"] = module
    module.entry = {"list": []}
    module.entry["list"].append(module.entry)
    holder = Holder()
    holder.self, holder.owner = holder, module
    module.holder = holder
    inside = Carries(Holder(parent=module))
    module.inside = inside
    assert whole(module) == whole(module)


def test_below_the_depth_objects_count_by_themselves():
    """Deep inside it is the object that counts, not what it holds: another one is another identity."""

    def nested(depth, value):
        return Carries(functools.reduce(lambda inner, _: Holder(a=inner), range(depth), Holder(value=value)))

    left, right = nested(8, 1), nested(8, 1)
    right.load_state_dict(left.state_dict())
    assert whole(left) == whole(left)
    assert whole(left) != whole(right)


def test_a_value_deep_inside_that_changes_counts():
    """A number in a list in a dict in an object."""
    module = Carries(Holder(table={"a": [1.0, 2.0]}))
    first = whole(module)
    module.entry.table["a"][1] = 3.0
    assert whole(module) != first


def _deep(depth):
    inner = last = Holder(value=1)
    for _ in range(depth):
        inner = Holder(a=inner)
    return Carries(inner), lambda: setattr(last, "value", 2)


def _in_place(entry, change):
    return Carries(entry), lambda: change(entry)


# Something that an attribute holds -> the module, and what changes it in place.
IN_PLACE = {
    "an object in an object": lambda: _deep(1),
    "two deeper": lambda: _deep(3),
    "five deeper": lambda: _deep(6),
    "an array": lambda: _in_place(torch.zeros(2).numpy(), lambda array: array.fill(1.0)),
    "an array in an object": lambda: _in_place(Holder(a=torch.zeros(2).numpy()), lambda holder: holder.a.fill(1.0)),
    "a queue": lambda: _in_place(collections.deque([1]), lambda queue: queue.append(2)),
    "a default dict": lambda: _in_place(collections.defaultdict(list, a=[1]), lambda table: table["a"].append(2)),
    "bytes": lambda: _in_place(bytearray(b"a"), lambda held: held.append(1)),
    "a user's dict": lambda: _in_place(collections.UserDict(a=[1]), lambda table: table["a"].append(2)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_lies_deep_inside_and_changes_in_place_counts(name):
    """Or it is out of reach: what is not looked at is not taken for unchanged."""
    module, change = IN_PLACE[name]()
    try:
        first = whole(module)
    except OutOfReach:
        return
    change()
    assert whole(module) != first


def test_a_long_chain_of_modules_is_walked_without_recursion():
    model = torch.nn.Linear(1, 1)
    for _ in range(3000):
        outer = torch.nn.Module()
        outer.inner = model
        model = outer
    assert whole(model) == whole(model)


# -- weakly -----------------------------------------------------------------------------------------------------------


def test_models_are_freed_although_they_were_walked_and_judged():
    _, paged = pair_of("llama")
    run(paged, ONE, max_new_tokens=2)
    held = [paged, middle(paged), paged.lm_head.weight, paged.model.rotary_emb.inv_freq]
    gone = [weakref.ref(entry) for entry in held]
    del paged, held
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_what_attributes_hold_is_freed():
    module = Carries(Holder(inner=Holder(deep=Holder(deeper=Holder(deepest=Holder())))))
    gone = weakref.ref(module.entry.inner.deep.deeper.deepest)
    whole(module)
    del module
    gc.collect()
    assert gone() is None


def test_an_address_that_is_used_again_is_another_number():
    seen = set()
    for _ in range(300):
        entry = Holder()
        number = identity._serial(entry)
        assert number == identity._serial(entry)
        assert number not in seen
        seen.add(number)
        del entry


def test_what_cannot_be_held_weakly_is_another_one_each_time():
    """Never found again, and never taken for what lay at its address before."""
    entry = Slots(1)
    assert identity._serial(entry) != identity._serial(entry)
    module = Carries(entry)
    assert whole(module) != whole(module)


def test_the_numbers_of_what_is_gone_are_forgotten():
    gc.collect()
    before = len(identity._serial._known)
    entries = [Holder() for _ in range(500)]
    for entry in entries:
        identity._serial(entry)
    del entries, entry
    gc.collect()
    assert len(identity._serial._known) <= before + 1


# -- tensors that are not plain ---------------------------------------------------------------------------------------


class TwoTensor(torch.Tensor):
    """Made of two others, and says so."""

    @staticmethod
    def __new__(cls, left, right, scale):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right, scale):
        self.left, self.right, self.scale = left, right, scale

    def __tensor_flatten__(self):
        return ["left", "right"], self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[arg.left if isinstance(arg, TwoTensor) else arg for arg in args], **(kwargs or {}))


class Secret(torch.Tensor):
    """Does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[arg.inner if isinstance(arg, Secret) else arg for arg in args], **(kwargs or {}))


class Labelled(torch.Tensor):
    """Plain memory, and an attribute."""


def labelled(content, label):
    tensor = content.as_subclass(Labelled)
    tensor.label = label
    return tensor


def test_a_tensor_that_says_what_it_is_made_of_counts_by_its_parts():
    def carrying(left=0.0, right=0.0, scale=1.0):
        module = Carries()
        module.linear = None
        module.entry = TwoTensor(torch.full((2,), left), torch.full((2,), right), scale)
        return whole(module)

    assert carrying() == carrying()
    assert len({carrying(), carrying(left=1.0), carrying(right=1.0), carrying(scale=2.0)}) == 4


def test_a_tensor_that_does_not_is_out_of_reach():
    with pytest.raises(OutOfReach, match="Secret"):
        whole(Carries(Secret(torch.zeros(2))))


def test_a_tensor_with_an_attribute_counts_by_content_and_attribute():
    def carrying(content, label):
        module = Carries(labelled(torch.full((2,), content), label))
        module.linear = None
        return whole(module)

    assert carrying(0.0, "a") == carrying(0.0, "a")
    assert len({carrying(0.0, "a"), carrying(1.0, "a"), carrying(0.0, "b")}) == 3


def test_a_sparse_tensor_is_out_of_reach():
    with pytest.raises(OutOfReach):
        whole(Carries(torch.eye(3).to_sparse()))


# -- out of reach -----------------------------------------------------------------------------------------------------


def test_weights_out_of_reach_are_counted_and_the_tokens_right():
    plain, paged = pair_of("llama")
    for model in (plain, paged):
        model.model.layers[1].unread = Secret(torch.zeros(2))
    for _ in range(2):
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    stats = paged.paged_stats()
    assert stats.stepped_aside == {"weights_out_of_reach": 2}
    assert stats.prefix_hit_tokens == 0 and stats.peak_used_blocks > 0


def test_weights_out_of_reach_that_are_vouched_for_are_found():
    _, paged = pair_of("llama", vouch=True)
    paged.model.layers[1].unread = Secret(torch.zeros(2))
    for _ in range(2):
        run(paged, ONE, max_new_tokens=3)
    assert paged.paged_stats().stepped_aside == {}
    assert paged.paged_stats().prefix_hit_tokens == 18


def test_weights_on_the_meta_device_are_out_of_reach():
    model = build("llama")
    model.model.layers[0].mlp.to("meta")
    with pytest.raises(OutOfReach, match="meta"):
        whole(model)
    identity.begin(Walk(model, vouched=True))


def test_weights_that_accelerate_keeps_in_memory_are_found_by_content():
    accelerate = pytest.importorskip("accelerate")
    plain, paged = pair_of("llama")
    accelerate.cpu_offload(paged, torch.device("cpu"))
    assert next(paged.parameters()).is_meta
    for _ in range(2):
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    stats = paged.paged_stats()
    assert stats.stepped_aside == {} and stats.prefix_hit_tokens == 18
    for model in (plain, paged):
        maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
        held = model.state_dict() if model is plain else next(filter(None, maps)).dataset
        held = getattr(held, "state_dict", held)
        with torch.no_grad():
            held["model.layers.0.mlp.up_proj.weight"].mul_(-3)
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    assert paged.paged_stats().prefix_hit_tokens == 18


def test_weights_that_accelerate_keeps_on_disk_are_out_of_reach(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain, paged = pair_of("llama")
    accelerate.disk_offload(paged, str(tmp_path), torch.device("cpu"))
    assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    assert paged.paged_stats().stepped_aside == {"weights_out_of_reach": 1}


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_small_models_are_always_looked_up(kind):
    for num_bytes in (0, 1, identity.SMALL - 1):
        assert identity.worth_looking_up(num_bytes, kind) == identity.worth_storing(num_bytes, kind) == 0


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_thresholds_fall_with_the_size_and_storing_takes_more(kind):
    """A token costs in proportion to the weights, as the checksum does; what it costs to start does not."""
    sizes = [identity.SMALL * 2**power for power in range(16)]
    looking = [identity.worth_looking_up(size, kind) for size in sizes]
    assert looking == sorted(looking, reverse=True)
    assert min(looking) > 0
    assert all(identity.worth_storing(size, kind) >= look for size, look in zip(sizes, looking, strict=True))


def test_thresholds_ask_no_clock(monkeypatch):
    import time

    def refuse(*args):
        raise AssertionError("a clock")

    expected = [identity.worth_looking_up(10**9, kind) for kind in ("cpu", "cuda")]
    for name in ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, refuse)
    assert [identity.worth_looking_up(10**9, kind) for kind in ("cpu", "cuda")] == expected


def test_a_call_too_short_neither_reads_nor_stores(monkeypatch):
    plain, paged = pair_of("llama")
    monkeypatch.setattr(identity, "SMALL", 0)
    least = identity.worth_looking_up(*hf_paged.patching._state_of(paged).gate.weights_of(paged))
    assert least > 19 + 3
    read = []
    own = identity.checksum.begin
    monkeypatch.setattr(identity.checksum, "begin", lambda tensors: read.append(1) or own(tensors))
    for _ in range(2):
        assert torch.equal(*[run(model, ONE, max_new_tokens=3) for model in (plain, paged)])
    assert not read
    assert paged.paged_stats().prefix_hit_tokens == 0
    assert paged.paged_stats().stepped_aside == {}
