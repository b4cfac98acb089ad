"""One `generate()` call of a patched model: what it asks for, its shortcuts, and what its tokens are found by."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from .. import implementations
from ..cache import PagedCache
from . import identity, salts
from .soundness import ALL, Gate, Reason, Shortcut, Verdict, hooks_before
from .transfer import on_host
from .witness import Witness

if TYPE_CHECKING:
    from ..cuda_graphs import Graphs
    from ..prefill import Unrepeated


class Call:
    """Carried on the call's own copy of the generation config, and gone with it.

    Args:
        gate: the patched model's.
        cache: the paged cache; of an encoder-decoder model that of self-attention.
        copies: rows made of one prompt.
        owned: the cache was made here and nobody sees it afterwards.
        mode: the library's name for how it generates.
        graphs: the model's CUDA graphs; None: none are replayed.
        salt: `generate(prefix_salt=...)`.
        loop: the decoding loop, if it is not the library's.
        runs_users_code: a processor, criterion or streamer that is not the library's runs between two forwards.
        weights: attention weights are asked for.

    Attributes:
        follows: what each forward is given is noted, to be found again.
        before: the rows before they were repeated for beams or samples, where they have images.
        processors: a processor or criterion that is not the library's; None: all are.
        verdict: what the gate says; None: not asked yet.
        identity: what the call's tokens are found by, salt apart; None: they are not.
    """

    def __init__(
        self,
        gate: Gate,
        cache: PagedCache,
        copies: int,
        owned: bool,
        mode: Any,
        graphs: "Graphs | None" = None,
        salt: str | None = None,
        loop: Any = None,
        runs_users_code: bool = False,
        weights: bool = False,
    ):
        self.gate = gate
        self.cache = cache
        self.session = None if graphs is None else graphs.open(cache)  # it ends with this object
        self.copies = copies
        self.owned = owned
        self.mode = str(getattr(mode, "value", mode))
        # Rows of a beam search are candidates, and an assistant's tokens may be taken back.
        self.follows = cache.state.follows = self.mode in ("greedy_search", "sample")
        self.salt = salt
        self.loop = loop
        self.runs_users_code = runs_users_code
        self.weights = weights
        self.before: Unrepeated | None = None
        self.processors: str | None = None
        self.verdict: Verdict | None = None
        self.identity: Hashable = None
        self.witness: Witness | None = None
        self._walk: identity.Walk | None = None

    def __deepcopy__(self, memo: dict) -> None:
        """A copied generation config is another call's."""
        return None

    # -- which shortcuts ----------------------------------------------------------------------------------------------

    def look(self, model: Any) -> Verdict:
        """What the gate says of this call. It looks once, before the first forward."""
        if self.verdict is None:
            self._walk = identity.Walk(model, self.gate.provenance, self.gate.vouch.everything)
            self.verdict = self.gate.judge(model, self._walk.modules)
            if self.loop is not None and not self.gate.vouch.everything and not self.gate.vouch(self.loop):
                self.verdict.bar(ALL, Reason.UNKNOWN_LOOP, repr(self.loop))
            if self.weights:
                self.verdict.bar(ALL - {Shortcut.MASK_ONCE}, Reason.WEIGHTS, _why_no_weights(model))
            for reason, detail in self.verdict.detail.items():
                self.step_aside(reason, detail)
            if self.session is not None and not self.allows(Shortcut.GRAPHS):
                self.session.refuse(self.verdict.barred[Shortcut.GRAPHS].value)
            self.cache.state.watched = self.allows(Shortcut.MASK_ONCE)
            self.cache.state.hooks = hooks_before(model)
        return self.verdict

    def allows(self, shortcut: Shortcut) -> bool:
        """Whether the call takes a shortcut. False until the gate has looked."""
        return self.verdict is not None and self.verdict.allows(shortcut)

    def step_aside(self, reason: Reason, detail: str = "") -> None:
        """Count that this call goes without something."""
        self.cache.pool.step_aside(reason.code, reason.value, self.cache.state.fallbacks, detail=detail)

    # -- what its tokens are found by ---------------------------------------------------------------------------------

    def begin_identity(self, model: Any, rows: int, columns: int) -> identity.Begun | None:
        """Begin to work out what the tokens of this call are stored under and found by, before its first forward.

        None where that is not to be had, or costs more than it can save.

        Args:
            rows, columns: of the prompts as the model is given them, copies for beams and samples included.
        """
        state, pool = self.cache.state, self.cache.pool
        verdict = self.look(model)
        if pool.index is None or not verdict.allows(Shortcut.PREFIXES):
            return None
        if self.namespace is None:
            self.step_aside(Reason.NO_SALT)
            if not self.cache.reset_if_stale:
                return None
        num_bytes, kind = self.gate.weights_of(model)
        prompts = max(rows // max(self.copies, 1), 1)
        tokens, most = prompts * columns, prompts * max(state.expected_columns or 0, columns)
        if tokens < identity.worth_looking_up(num_bytes, kind) and most < identity.worth_storing(num_bytes, kind):
            return None
        assert self._walk is not None
        try:
            begun = identity.begin(self._walk)
        except identity.OutOfReach as error:
            verdict.bar((Shortcut.PREFIXES,), Reason.OUT_OF_REACH)
            self.step_aside(Reason.OUT_OF_REACH, str(error))
            return None
        self.gate.weights = (begun.num_bytes, kind)
        if self.follows and self.runs_users_code and not self.gate.vouch.everything:
            self.witness = Witness(self._walk.modules, begun.tensors, self.gate.provenance)
        return begun

    @property
    def namespace(self) -> str | None:
        """The salt in force; None: nothing is found or stored."""
        return salts.in_force(self.salt, self.cache.prefix_salt)

    def settle(self, model: Any) -> None:
        """All rows are done: if the weights are those that the call began with, what it generated may be found."""
        state, pool = self.cache.state, self.cache.pool
        known = state.known
        known.witness = None  # it holds the model
        if known.identity is None or not known.fed:
            return
        whole = known.ids is not None and state.rows == len(known.ids) and state.columns == known.fed_columns
        num_bytes, kind = self.gate.weights_of(model)
        if not whole or known.fed_columns * (state.rows or 0) < identity.worth_storing(num_bytes, kind):
            return
        walk = identity.Walk(model, self.gate.provenance, self.gate.vouch.everything)
        if not self.gate.judge(model, walk.modules).allows(Shortcut.PREFIXES):
            self.step_aside(Reason.UNSTEADY)  # something unknown has come while the call ran
            return
        try:
            begun = identity.begin(walk)
        except identity.OutOfReach:
            return
        ids, *arrived = on_host(known.together(), *begun.content.on_device)  # one wait for both
        assert ids is not None
        if begun.finish([tensor for tensor in arrived if tensor is not None]) != self.identity:
            self.step_aside(Reason.UNSTEADY)
            return
        known.note(ids, known.real)
        pool.settle_trial(known)
        state.remember()


def _why_no_weights(model: Any) -> str:
    """Why none will come, where the unpatched model gives none either; "": they will."""
    before = implementations.before(model.config.get_text_config(decoder=True)) or implementations.before(model.config)
    if before in (None, implementations.NAME, "eager"):
        return ""
    return f'{before} attention gives none; model.set_attn_implementation("eager") does'
