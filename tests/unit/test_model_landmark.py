"""Landmark attention in the models of both families: whole rows, decoding, and what is refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from cat_lm import architectures
from cat_lm.model import attention
from cat_lm.model.attention.modules.landmark import train_landmarks
from cat_lm.model.cache import CatCache
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.ops.landmark import attend, decode, select
from tests.unit.tiny_models import GROUPED, SIZES, VARIANTS, cat_model, random_ids

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OPTIONS = {"block": 4, "top_k": 2, "local": 2}
OPTION_NAMES = attention.pattern(CatConfig(attention="landmark")).options.keys()
FAMILIES = {"gpt_neox": VARIANTS["head"], "llama": GROUPED | {"conv_type": "none"}}
each_family = pytest.mark.parametrize("family", FAMILIES)
# One of each filter and of each share.
KINDS = {
    "box": {},
    "exponential": {"filter": "exponential", "share": "layer", "sink": True},
    "learned": {"filter": "learned"},
    "ssm": {"filter": "ssm", "filter_state": 4},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def landmark_model(family="gpt_neox", **options):
    own = {name: options.pop(name) for name in OPTION_NAMES & options.keys()}
    fields = {"conv_window": 3, **FAMILIES[family], **options}
    model = cat_model(attention="landmark", attention_options=OPTIONS | own, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(4)  # so that the choice of blocks matters
    return model


def chunks(model, ids, lengths, cache=None, mask=None):
    """The logits of rows that are given in parts."""
    cache, outputs, start = cache or CatCache(model.config), [], 0
    for length in lengths:
        stop = start + length
        given = None if mask is None else mask[:, :stop]
        output = model(ids[:, start:stop], attention_mask=given, past_key_values=cache)
        outputs.append(output.logits)
        start = stop
    return torch.cat(outputs, dim=1), cache


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("paddings", [(9,), (6, 11)])
@pytest.mark.parametrize("by", ["sdpa", "eager"])
def test_prompts_of_which_none_fills_its_row(by, paddings, kind):
    """As where texts are padded to a fixed length; the first part has no complete block."""
    model = landmark_model(**KINDS[kind])
    model.set_attn_implementation(by)
    rows, mask = random_ids(len(paddings), 40), torch.ones(len(paddings), 40, dtype=torch.long)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    for lengths in ([40], [12, 25, 1, 2]):
        found, _ = chunks(model, rows, lengths, mask=mask)
        for row, padding in enumerate(paddings):
            expected = model(rows[row : row + 1, padding:], use_cache=False).logits[0]
            torch.testing.assert_close(found[row, padding:], expected, **CLOSE)


@each_family
def test_an_assistant_drafts(family):
    model, assistant = landmark_model(family), landmark_model(family, top_k=1)
    options = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
    for one in (model, assistant):
        one.generation_config.pad_token_id = None
    ids = random_ids(1, 19)
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)


class Written(TorchDispatchMode):
    """Counts the numbers that operators write into new tensors, all and those of the largest."""

    def __init__(self):
        super().__init__()
        self.numbers = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = function(*args, **kwargs or {})
        for x in found if isinstance(found, tuple) else (found,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numbers += x.numel()
                self.largest = max(self.largest, x.numel())
        return found


@torch.no_grad()
@pytest.mark.parametrize("compiled", [True, False])
def test_a_token_copies_nothing_of_the_past(compiled, monkeypatch):
    """Beside what is done for each landmark, a step at 1,600 tokens does what it does at 400."""

    if not compiled:
        monkeypatch.setattr(decode, "has_kernel", lambda *_: False)

    def step(model, tokens):
        ids = random_ids(1, tokens + 2)
        _, cache = chunks(model, ids, [tokens, 1])
        with Written() as written:
            model(ids[:, -1:], past_key_values=cache)
        return written.numbers

    fields = {"num_hidden_layers": 1, "max_position_embeddings": 2048, "block": 16}
    model = landmark_model(**fields)
    short, long = step(model, 400), step(model, 1600)
    blocks = (1600 - 400) // 16
    assert long - short < 60 * blocks < (1600 - 400) * 32  # about ten numbers a head and landmark
    dense = cat_model(conv_type="none", num_hidden_layers=1, max_position_embeddings=2048)
    assert step(dense, 1600) - step(dense, 400) >= 2 * (1600 - 400) * 32  # keys and values


@torch.no_grad()
@each_family
def test_long_rows_are_read_in_parts(family, monkeypatch):
    """By the same definition, padded and in a cache, in memory that grows with their length."""
    model, ids = landmark_model(family, max_position_embeddings=512), random_ids(2, 400)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    expected = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=False).logits
    monkeypatch.setattr(attend, "QUERY_CHUNK", 32)
    monkeypatch.setattr(select, "QUERY_CHUNK", 32)
    for use_cache in (False, True):
        found = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=use_cache).logits
        real = mask[:, :90].bool()
        torch.testing.assert_close(found[real], expected[real], **CLOSE)
    largest = []
    for time in (200, 400):
        with Written() as written:
            model(ids[:, :time], logits_to_keep=1, use_cache=True)
        largest.append(written.largest)
    assert largest[1] <= 2.1 * largest[0]


@each_kind
def test_bfloat16(kind):
    """Weights in bf16, and autocast over fp32 ones; training by every way."""
    whole, ids = landmark_model(**KINDS[kind]), random_ids(2, 41)
    half = landmark_model(**KINDS[kind]).bfloat16()
    with torch.no_grad():
        logits, _ = chunks(half, ids, [30, 1, 1, 9])
        # Rounding may choose other blocks.
        wrong = (logits.float() - whole(ids, use_cache=False).logits).abs() > 0.2
        assert logits.dtype == torch.bfloat16 and wrong.float().mean() < 0.1
    for model in (half, whole):
        for way in ("hard", "dense", "guided"):
            train_landmarks(model.train(), way, rows=8)
            with torch.autocast("cpu", torch.bfloat16, enabled=model is whole):
                output = model(ids, labels=ids)
            loss = output.loss if way != "guided" else output.loss + output.auxiliary_loss
            loss.backward()
            assert loss.isfinite() and loss > 4
            grads = {name: p.grad for name, p in model.named_parameters()}
            assert all(g.isfinite().all() for n, g in grads.items() if g is not None)
            # Filters and sharpness learn from the landmarks' loss alone.
            taught = {name for name, gradient in grads.items() if gradient is None}
            assert all(".core." in name for name in taught) and (way != "guided" or not taught)
            model.zero_grad()


@each_family
def test_the_parameters_start_as_they_should(family):
    model = landmark_model(family, **KINDS["learned"])
    known = architectures.get(family)
    heads = model.config.stream_heads("k")
    fresh = known.classes().causal_lm(model.config).state_dict()
    cores = [name for name in fresh if ".core." in name]
    assert len(cores) == 4
    for name in cores:
        assert fresh[name].shape == ((heads, 4) if name.endswith("filter") else (4,))
        start = 0.25 if name.endswith("filter") else 0.5 * torch.tensor(8.0).log()
        assert (fresh[name] == start).all()


WRONG = {
    "block=0: must be a whole number of at least 1": {"block": 0},
    "top_k='eight': must be a whole number of at least 0": {"top_k": "eight"},
    "local=true: must be a whole number of at least 1": {"local": True},
    "sink=1: must be true or false": {"sink": 1},
    "filter='gauss': must be one of box, exponential, learned": {"filter": "gauss"},
    "share='model': must be one of head, layer": {"share": "model"},
    "filter=exponential: says nothing with top_k=0": {"top_k": 0, "filter": "exponential"},
    "share=layer: says nothing with top_k=0": {"top_k": 0, "share": "layer"},
    "blocks: unknown with attention=landmark; known: block, top_k": {"blocks": 2},
}


@pytest.mark.parametrize("said", WRONG)
def test_options_that_are_wrong_or_say_nothing(said):
    with pytest.raises(ValueError) as error:
        CatConfig(**SIZES, attention="landmark", attention_options=WRONG[said])
    assert f"attention_options.{said}" in str(error.value).replace('"', "'")


def test_what_cannot_serve_is_refused():
    with pytest.raises(ValueError, match=r"flex_attention: cannot compute landmark attention .*"):
        landmark_model(attn_implementation="flex_attention")
    config = CatConfig(attention="landmark")
    (said,) = attention.implementation_problems(config, "flash_attention_2")
    assert said.endswith("(attention=landmark); use one of eager, sdpa")
    with pytest.raises(ValueError, match=r"attention=landmark: not with conv_mixing=maps"):
        landmark_model(**VARIANTS["maps"])
    with pytest.raises(ValueError, match="score_transform"):
        landmark_model(score_transform="decay")
    model, ids = landmark_model(conv_type="none"), random_ids(2, 9)
    filled = DynamicCache()
    for layer in range(2):
        filled.update(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), layer)
    with pytest.raises(ValueError, match=r"this cache holds keys and values without the states"):
        model(ids, past_key_values=filled)
    prepared = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="not a prepared mask"):
        model(ids, attention_mask=prepared, padding_mask=torch.ones(2, 9))
    gap = torch.ones(2, 9)
    gap[1, 4] = 0
    with pytest.raises(ValueError, match="no padding between the tokens of a row"):
        model(ids, attention_mask=gap)
    ends = torch.ones(2, 10)
    ends[1, 7:9] = 0
    output = model(ids, attention_mask=ends[:, :9], use_cache=True)
    with pytest.raises(ValueError, match="tokens follow padding at the end of a row"):
        model(ids[:, :1], attention_mask=ends, past_key_values=output.past_key_values)
