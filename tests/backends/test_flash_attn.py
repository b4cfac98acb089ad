"""The flash-attn backend on a flash-attn of our own: the real signatures, and a softmax per query over block tables."""

import sys
import types

import pytest
import torch

import hf_paged
from hf_paged.backends import choose, flash_attn, reference, torch_strided

from .builders import LIVES, Batch, PaddedBatch, Shape, nested, ragged


def attention(query, keys, values, scale, window_size, softcap):
    """One row, [q, heads, dim] and [n, kv_heads, dim]; causal to the lower right, window counted to both sides."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, 1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(query))[:, None] + len(keys) - len(query)
    places = torch.arange(len(keys))[None]
    seen = places <= at
    if window_size[0] >= 0:
        seen &= places >= at - window_size[0]
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), 2).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


class Fake:
    """Both versions' functions, and which of them was called."""

    def __init__(self, monkeypatch, version):
        self.calls = []
        self.version = version
        module = types.ModuleType("flash_attn_interface" if version == 3 else "flash_attn")
        module.flash_attn_with_kvcache = self.kvcache3 if version == 3 else self.kvcache2
        if version == 2:
            module.flash_attn_varlen_func = self.varlen2
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(flash_attn, "DEVICES", ("cpu",))

    def row(self, query, cache, table, length, options):
        for tensor in cache:
            assert tensor.stride(-1) == 1
        assert table.dtype == torch.int32 and table.stride(-1) == 1
        assert self.version == 3 or cache[0].shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
        blocks = table[: -(-length // cache[0].shape[1])].long()
        keys, values = (tensor[blocks].flatten(0, 1)[:length] for tensor in cache)
        return attention(query, keys, values, *options)

    def kvcache2(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert causal and q.dim() == 4 and block_table.shape[0] == len(q) == len(cache_seqlens)
        self.calls.append("kvcache")
        options = (softmax_scale, window_size, softcap)
        rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
        return torch.stack([self.row(query, (k_cache, v_cache), *row, options) for query, *row in rows])

    def varlen2(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert causal and dropout_p == 0.0
        self.calls.append("varlen")
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_k == lengths.max() and max_seqlen_q == cu_seqlens_q.diff().max()
        return self.packed(q, (k, v), cu_seqlens_q, lengths, block_table, (softmax_scale, window_size, softcap))

    def packed(self, q, cache, cu_seqlens_q, lengths, table, options):
        queries = q.tensor_split(cu_seqlens_q[1:-1].tolist())
        rows = zip(queries, table, lengths.tolist(), strict=True)
        return torch.cat([self.row(query, cache, *row, options) for query, *row in rows])

    def kvcache3(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        options = (softmax_scale, window_size, softcap)
        if cu_seqlens_q is None:
            out = self.kvcache2(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table, causal=causal,
                softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
            )  # fmt: skip
            return out
        assert causal and q.dim() == 3 and max_seqlen_q == cu_seqlens_q.diff().max()
        self.calls.append("packed")
        return self.packed(q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, options)


@pytest.fixture(autouse=True)
def _afresh():
    flash_attn.library.cache_clear()
    yield
    flash_attn.library.cache_clear()


@pytest.fixture
def only_flash(monkeypatch):
    """Nothing goes to another backend."""

    def refuse(*_):
        raise AssertionError("left to the other backend")

    monkeypatch.setattr(torch_strided, "attend", refuse)


HALF = Shape(dtype=torch.float16)
VERSIONS = pytest.mark.parametrize(("version", "size"), [(2, 256), (3, 4)])


def agree(step, **options):
    call = step.call(**options)
    out, right = step.run(flash_attn.attend, call), step.run(reference.attend, call)
    assert out.shape == right.shape and out.dtype == right.dtype
    torch.testing.assert_close(out, right, atol=4e-3, rtol=4e-3)


def in_half(step):
    """A step of any life in float16: lives that take no shape are float32."""
    step.query = step.query.half()
    memory = step.store.memory
    step.store.memory = type(memory)(memory.keys.half(), memory.values.half())
    return step


@VERSIONS
@pytest.mark.parametrize("life", LIVES.values(), ids=list(LIVES))
def test_prefill_extend_and_decode_equal_the_reference(life, version, size, monkeypatch, only_flash):
    fake = Fake(monkeypatch, version)
    for step in life(size):
        whole = step.store.memory
        agree(in_half(step))
        step.store.memory = whole
    assert fake.calls


@VERSIONS
@pytest.mark.parametrize("options", [dict(softcap=1.0), dict(band=5)], ids=str)
def test_options(options, version, size, monkeypatch, only_flash):
    Fake(monkeypatch, version)
    for step in ragged(size, HALF):
        agree(step, **options)


@VERSIONS
@pytest.mark.parametrize(("window", "band"), [(9, 9), (9, 3)])
def test_windows_and_the_blocks_that_left_them(window, band, version, size, monkeypatch, only_flash):
    Fake(monkeypatch, version)
    for step in ragged(min(size, 256), HALF, window=window):
        agree(step, band=band)


def test_a_window_without_a_band_is_taken_for_one_query_only(monkeypatch):
    fake = Fake(monkeypatch, 3)
    for step in ragged(2, HALF, window=5):
        before = len(fake.calls)
        agree(step)
        assert len(fake.calls) - before == (step.query.shape[2] == 1)


@VERSIONS
def test_many_rows_in_one_packed_forward(version, size, monkeypatch, only_flash):
    fake = Fake(monkeypatch, version)
    batch = Batch(3, HALF, block_size=size)
    batch.step([5, 0, 13], q_len=13)
    step = batch.step([6, 2, 9], q_len=9)
    new = step.plan.new
    step.query = torch.cat([step.query[row : row + 1, :, 9 - count :] for row, count in enumerate(new)], 2)
    step.plan.offsets, step.plan.q_len = [0, 6, 8], 17
    agree(step)
    assert fake.calls == ["varlen" if version == 2 else "packed"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(dtype=torch.float32), {}),
        (Shape(2, 2, 16, 8, dtype=torch.float16), {}),
        (Shape(2, 2, 20, dtype=torch.float16), {}),
        (Shape(1, 1, 264, dtype=torch.float16), {}),
        (Shape(dtype=torch.float32, stored_as=torch.float16), {}),
        (HALF, dict(sinks=torch.linspace(-1, 3, 4))),
        (HALF, dict(slopes=torch.linspace(0.1, 1, 4))),
    ],
    ids=["float32", "unlike dims", "dim 20", "dim 264", "another store", "sinks", "slopes"],
)
def test_what_it_has_no_arguments_for_goes_to_another_backend(shape, options, monkeypatch):
    fake = Fake(monkeypatch, 3)
    for step in ragged(4, shape):
        agree(step, **options)
    assert not fake.calls


def test_pads_behind_tokens_go_to_another_backend(monkeypatch):
    fake = Fake(monkeypatch, 3)
    batch = PaddedBatch(3)
    agree(in_half(batch.step(["ab..c", "abcde", "..abc"])))
    assert not fake.calls


def test_what_is_sent_is_sent_once_a_forward(monkeypatch, only_flash):
    Fake(monkeypatch, 3)
    step = in_half(list(nested(4))[2])
    step.plan.scratch.clear()
    arguments = (step.query, None, None, step.store.memory, step.plan, step.call())
    flash_attn.attend(*arguments)
    held = dict(step.plan.scratch)
    flash_attn.attend(*arguments)
    assert len(held) == 1 and all(step.plan.scratch[key] is value for key, value in held.items())


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(RuntimeError, match=r"pip install 'flash-attn>=2\.6'"):
        choose("flash_attn", 256)


def test_an_unsuitable_block_size_is_refused_and_says_what_to_change(monkeypatch):
    Fake(monkeypatch, 2)
    with pytest.raises(RuntimeError, match=r"block_size is 16: set block_size=256"):
        choose("flash_attn", 16)
    assert choose("flash_attn", 256).attend is flash_attn.attend


def test_flash_attention_3_takes_any_block_size_and_goes_first(monkeypatch):
    Fake(monkeypatch, 2)
    Fake.__init__(fake := Fake.__new__(Fake), monkeypatch, 3)
    assert choose("flash_attn", 16).attend is flash_attn.attend and flash_attn.library().version == 3 == fake.version


def test_a_pool_is_made_with_it_or_says_why_not(monkeypatch):
    from transformers import LlamaConfig

    Fake(monkeypatch, 2)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    pool = hf_paged.KVPool(config, hf_paged.PagedConfig(backend="flash_attn", block_size=256))
    assert pool.backend is flash_attn.attend
    with pytest.raises(RuntimeError, match="block_size"):
        hf_paged.KVPool(config, hf_paged.PagedConfig(backend="flash_attn"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_real_package_equals_the_reference():
    pytest.importorskip("flash_attn", reason="needs the package flash-attn")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        for step in ragged(256, Shape(2, 4, 64, dtype=dtype)):
            memory = step.store.memory
            step.store.memory = type(memory)(memory.keys.cuda(), memory.values.cuda())
            step.query = torch.randn(step.query.shape, generator=generator).to(dtype).cuda()
            out, right = step.run(flash_attn.attend, from_store=True), step.run(reference.attend, from_store=True)
            step.store.memory = memory
            close = 4e-3 if dtype == torch.float16 else 3e-2
            torch.testing.assert_close(out, right, atol=close, rtol=close)
