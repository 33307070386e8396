"""Tokenizers of all libraries in one form: each library's own encode is the oracle."""

import concurrent.futures
import functools
import io
import pickle
import random
import subprocess
import sys

import cloudpickle
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from conftest import assert_trees_equal
from hypothesis import given, settings
from test_bad_input import refuses

import millstream as ms
from millstream.tokenizers import Tokenizer, byte_tokenizer

WORDS = "the a mill stream grinds corn oats and rye slowly quickly by night day water wheel stone".split()
ENDS = "<|endoftext|>"


def texts(count, seed):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randrange(30))) for _ in range(count)]


@functools.cache
def hugging_face_json(size=320):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts(200, 0), trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    return model.to_str()


def hugging_face(size=320):
    return tokenizers.Tokenizer.from_str(hugging_face_json(size))


def padded(length=None):
    model = hugging_face()
    model.enable_padding(length=length, pad_id=1)
    model.enable_truncation(12)
    return model


def encoding(*merges, ends=ENDS):
    ranks = {bytes([number]): number for number in range(256)}
    ranks |= {merge: 256 + number for number, merge in enumerate((b"th", b"mi", b"ll", b"mill", *merges))}
    return tiktoken.Encoding("made", pat_str=r"\s?\w+|.", mergeable_ranks=ranks, special_tokens={ends: len(ranks) + 5})


@functools.cache
def sentencepiece_model(size=40):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300, 1)), model_writer=file, vocab_size=size, minloglevel=2, byte_fallback=False
    )
    return file.getvalue()


def pieces(size=40, **settings):
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(size), **settings)


class LikeTransformers:
    """What transformers' tokenizers have: lists for ids, and the library's own tokenizer inside."""

    eos_token_id = 1
    all_special_tokens = ("<bos>", "<eos>")

    def __init__(self):
        self.backend_tokenizer = hugging_face()

    def __call__(self, text):
        raise AssertionError("it gives a dict")

    def get_vocab(self):
        return self.backend_tokenizer.get_vocab()

    def encode(self, text, add_special_tokens=True):
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids):
        return self.backend_tokenizer.decode(ids)


def letters(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64) * 300


# A model, the library's own ids of a text, and the settings of ours.
LIBRARIES = {
    "tokenizers": (hugging_face, lambda model: lambda text: model.encode(text).ids, {}),
    "tokenizers, nothing added": (
        hugging_face,
        lambda model: lambda text: model.encode(text, add_special_tokens=False).ids,
        {"add_special_tokens": False},
    ),
    "tokenizers, padded to the longest": (padded, lambda model: lambda text: model.encode(text).ids, {}),
    "tokenizers, of one length": (
        functools.partial(padded, length=12),
        lambda model: lambda text: model.encode(text).ids,
        {},
    ),
    "like transformers": (LikeTransformers, lambda model: model.encode, {}),
    "tiktoken": (encoding, lambda model: model.encode_ordinary, {}),
    "sentencepiece": (pieces, lambda model: model.encode, {}),
    "sentencepiece, with ends": (functools.partial(pieces, add_bos=True, add_eos=True), lambda model: model.encode, {}),
    "sentencepiece, without": (
        functools.partial(pieces, add_bos=True),
        lambda model: lambda text: model.encode(text, add_bos=False),
        {"add_special_tokens": False},
    ),
    "a function": (lambda: letters, lambda model: lambda text: model(text).tolist(), {"vocabulary_size": 76801}),
}
every_library = pytest.mark.parametrize("name", LIBRARIES)


def made(name):
    make, own, settings = LIBRARIES[name]
    model = make()
    return Tokenizer(model, **settings), own(model)


@every_library
def test_ids_are_those_of_the_library(name):
    tokenizer, own = made(name)
    samples = [*texts(20, 2), "", "über 水 <eos>", f"a {ENDS} b"]
    for text in samples:
        ids = tokenizer(text)
        assert ids.tolist() == own(text)
        assert ids.shape == (len(own(text)),)
        assert ids.dtype == tokenizer.dtype == (np.uint32 if name == "a function" else np.uint16)
    for ids, text in zip(tokenizer.encode_batch(samples), samples, strict=True):
        assert (ids.dtype, ids.tolist()) == (tokenizer.dtype, own(text))


@every_library
def test_a_copy_by_pickle_gives_the_same_and_has_the_same_fingerprint(name):
    tokenizer, own = made(name)
    for module in (pickle, cloudpickle):
        copy = pickle.loads(module.dumps(tokenizer))
        assert [copy(text).tolist() for text in texts(10, 3)] == [own(text) for text in texts(10, 3)]
        for attribute in ("eos", "vocabulary_size", "dtype", "fingerprint"):
            assert getattr(copy, attribute) == getattr(tokenizer, attribute)
        assert repr(copy) == repr(tokenizer)


def test_a_setting_that_the_library_does_not_pickle_is_kept():
    model = hugging_face()
    model.encode_special_tokens = True  # as text
    tokenizer = Tokenizer(model)
    assert pickle.loads(pickle.dumps(model)).encode("<eos>").ids != model.encode("<eos>").ids
    assert pickle.loads(pickle.dumps(tokenizer))("<eos>").tolist() == model.encode("<eos>").ids
    assert tokenizer.fingerprint != Tokenizer(hugging_face()).fingerprint


@pytest.mark.parametrize(
    ("name", "eos", "size"),
    [
        ("tokenizers", None, 320),
        ("like transformers", 1, 320),
        ("tiktoken", 265, 266),
        ("sentencepiece", 2, 40),
        ("a function", None, 76801),
    ],
)
def test_the_end_token_and_the_size_are_those_of_the_model(name, eos, size):
    tokenizer, _ = made(name)
    assert (tokenizer.eos, tokenizer.vocabulary_size) == (eos, size)


def test_the_end_token_is_given_by_name_or_by_id():
    assert Tokenizer(hugging_face(), eos="<eos>").eos == Tokenizer(hugging_face(), eos=np.int64(1)).eos == 1
    assert Tokenizer(pieces(), eos="<s>").eos == 1
    assert Tokenizer(encoding(ends="<end>")).eos is None
    assert Tokenizer(encoding(ends="<end>"), eos="<end>").eos == 265
    assert Tokenizer(pieces(), vocabulary_size=64).vocabulary_size == 64
    assert Tokenizer(hugging_face(), vocabulary_size=1 << 16).dtype == np.uint16
    assert Tokenizer(hugging_face(), vocabulary_size=(1 << 16) + 1)("mill").dtype == np.uint32


def test_ids_with_gaps_count_to_the_highest():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"mill": 3, "[UNK]": 900}, unk_token="[UNK]"))
    assert Tokenizer(model).vocabulary_size == 901
    assert Tokenizer(model)("mill").tolist() == [3]


@pytest.mark.parametrize("name", ["tokenizers", "like transformers", "tiktoken", "sentencepiece"])
def test_text_comes_back(name):
    tokenizer, _ = made(name)
    for text in filter(None, texts(10, 4)):
        for ids in (tokenizer(text), tokenizer(text).tolist(), jnp.asarray(tokenizer(text))):
            assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_bytes_are_the_text_and_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(np.append(ids, 256)) == text
    (again,) = tokenizer.encode_batch([text])
    assert again.tolist() == ids.tolist()


@settings(max_examples=50, deadline=None)
@given(before=st.text(), half=st.characters(categories=["Cs"]), after=st.text())
@pytest.mark.parametrize("name", ["bytes", "tokenizers", "tiktoken", "sentencepiece"])
def test_half_of_a_surrogate_pair_is_refused_by_all(name, before, half, after):
    tokenizer = byte_tokenizer() if name == "bytes" else _shared(name)
    words = (f"Character {len(before):,} is {half!r}, half of a surrogate pair. Replace such characters",)
    with refuses(ValueError, "Tokenizer needs text that can be written in UTF-8", *words):
        tokenizer(before + half + after)
    with refuses(ValueError, "Tokenizer.encode_batch: texts[1] needs text that can be written in UTF-8", *words):
        tokenizer.encode_batch(["", before + half + after])


@functools.cache
def _shared(name):
    return made(name)[0]


# What gives different ids, or means something else, has a different fingerprint.
DIFFERENT = {
    "tokenizers": lambda: Tokenizer(hugging_face()),
    "a larger vocabulary": lambda: Tokenizer(hugging_face(330)),
    "without special tokens": lambda: Tokenizer(hugging_face(), add_special_tokens=False),
    "cut": lambda: Tokenizer(_cut()),
    "an end token": lambda: Tokenizer(hugging_face(), eos="<eos>"),
    "more room": lambda: Tokenizer(hugging_face(), vocabulary_size=1 << 17),
    "tiktoken": lambda: Tokenizer(encoding()),
    "one more merge": lambda: Tokenizer(encoding(b"stone")),
    "another name for the end": lambda: Tokenizer(encoding(ends="<end>")),
    "sentencepiece": lambda: Tokenizer(pieces()),
    "fewer pieces": lambda: Tokenizer(pieces(39)),
    "a beginning": lambda: Tokenizer(pieces(add_bos=True)),
    "bytes": byte_tokenizer,
}


def _cut():
    model = hugging_face()
    model.enable_truncation(4)
    return model


def test_fingerprints_tell_vocabularies_and_settings_apart():
    found = {name: make().fingerprint for name, make in DIFFERENT.items()}
    assert len(set(found.values())) == len(DIFFERENT)
    assert found == {name: make().fingerprint for name, make in DIFFERENT.items()}


def test_fingerprints_are_the_same_in_another_process(folder):
    wanted = {name: DIFFERENT[name]() for name in ("tokenizers", "one more merge", "a beginning", "bytes")}
    (folder / "tokenizers").write_bytes(pickle.dumps(list(wanted.values())))
    # The copy has the fingerprint that was made here only if one was; these have not.
    script = "import pickle, sys; print(*(one.fingerprint for one in pickle.load(open(sys.argv[1], 'rb'))))"
    command = [sys.executable, "-c", script, str(folder / "tokenizers")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [one.fingerprint for one in wanted.values()]


def tokens_of(tokenizer, samples):
    source = ms.DatasetSource([{"text": text} for text in samples])
    return source.map(lambda sample: {"tokens": tokenizer(sample["text"])})


def test_a_plan_of_a_different_tokenizer_is_not_used(folder):
    samples = ["mill"] * 100
    samples[3] = "stone stone"  # not one of the sixteen that are looked at
    for tokenizer in map(Tokenizer, (encoding(), encoding(b"stone", b" stone", b"st", b"one", b"sto", b"ne"))):
        view = ms.views.pack(tokens_of(tokenizer, samples), 16, plans=folder)
        alone = ms.views.pack(tokens_of(tokenizer, samples), 16)
        assert_trees_equal(view.read(np.arange(len(view))), alone.read(np.arange(len(alone))))
        assert len(list(folder.iterdir())) == 2 * (1 + (tokenizer.vocabulary_size > 266))


class Tokenize:
    """A function with a tokenizer in it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, sample):
        return {"tokens": self.tokenizer(sample["text"])}

    def method(self, sample):
        return self(sample)


def _tokenized(tokenizer, sample):
    return {"tokens": tokenizer(sample["text"])}


@pytest.mark.parametrize(
    "make",
    [
        Tokenize,
        lambda tokenizer: Tokenize(tokenizer).method,
        lambda tokenizer: functools.partial(_tokenized, tokenizer),
        lambda tokenizer: functools.partial(
            lambda sample, tokenizer: _tokenized(tokenizer, sample), tokenizer=tokenizer
        ),
        lambda tokenizer: lambda sample: (lambda: _tokenized(tokenizer, sample))(),
        lambda tokenizer: functools.partial(lambda sample: _tokenized(tokenizer, sample)),
    ],
    ids=["object", "method", "partial", "keyword", "closure", "closure of a partial"],
)
def test_a_tokenizer_is_found_wherever_a_function_has_it(folder, make):
    samples = ms.DatasetSource([{"text": "mill"}] * 20)
    for number, tokenizer in enumerate((encoding(), encoding(b"stone"), encoding()), start=1):
        ms.views.pack(samples.map(make(Tokenizer(tokenizer))), 16, plans=folder)
        assert len(list(folder.iterdir())) == 2 * min(number, 2)


def test_of_a_function_plan_files_see_the_code(folder):
    def first(text):
        return [1] * len(text)

    def second(text):
        return [1] * len(text) + [2]

    source = ms.DatasetSource(["mill", "stream"] * 10)
    for number, function in enumerate((first, second, first), start=1):
        tokenizer = Tokenizer(function, vocabulary_size=9)
        assert tokenizer.fingerprint is None
        view = ms.views.select(source, lambda text, tokenizer=tokenizer: len(tokenizer(text)) > 4, plans=folder)
        assert len(view) == (20 if function is second else 10)
        assert len(list(folder.iterdir())) == min(number, 2)


def test_a_plan_of_lines_through_a_function_is_not_used_for_a_changed_file(folder):
    tokenizer, lines = Tokenizer(encoding()), ["mill"] * 100
    for number, changed in enumerate(("rye ", "mill"), start=1):
        lines[3] = changed  # not one of the sixteen that are looked at
        (folder / "lines.txt").write_text("\n".join(lines))
        rows = ms.sources.TextLinesSource(folder / "lines.txt").map(lambda line: {"tokens": tokenizer(line)})
        view, alone = ms.views.pack(rows, 8, plans=folder / "plans"), ms.views.pack(rows, 8)
        assert_trees_equal(view.read(np.arange(len(view))), alone.read(np.arange(len(alone))))
        assert len(list((folder / "plans").iterdir())) == 2 * number


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "sentencepiece", "bytes"])
def test_every_executor_gives_the_same_batches(name, key, capfd):
    tokenizer = byte_tokenizer() if name == "bytes" else made(name)[0]
    tokenizer.encode_batch(texts(50, 5))  # with the library's own threads, before processes are started
    rows = ms.views.pack(tokens_of(tokenizer, texts(60, 6)), 64, eos=tokenizer.eos)
    found = []
    for executor in (None, ms.Threads(2), ms.Processes(1)):
        with ms.DataLoader([rows, ms.BatchTransform(4)], executor=executor) as loader:
            found.append([batch for batch, _ in loader.iterate(loader.init_state(key))])
    assert_trees_equal(found[0], found[1])
    assert_trees_equal(found[0], found[2])
    assert found[0][0]["tokens"].dtype == np.uint16
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name.startswith("tokenizers")])
def test_texts_in_a_worker_are_those_of_the_library(name, key):
    tokenizer, own = made(name)
    words = ["stream", "mill and stream", "<eos> über"]
    together = lambda sample: {"tokens": np.concatenate(tokenizer.encode_batch(words))}  # noqa: E731
    alone = lambda sample: {"tokens": np.concatenate([tokenizer(word) for word in words])}  # noqa: E731
    for fn in (together, alone):
        source = ms.DatasetSource([{"text": "stream"}] * 4).map(fn)
        with ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(1)) as loader:
            batch, _ = next(loader.iterate(loader.init_state(key)))
        assert batch["tokens"][0].tolist() == [number for word in words for number in own(word)]


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "sentencepiece"])
def test_threads_may_share_a_tokenizer(name):
    tokenizer, own = made(name)
    samples = texts(200, 7)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer, samples))
    assert [ids.tolist() for ids in found] == [own(text) for text in samples]


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (b"mill", "Got b'mill' (bytes). Decode it first: text.decode()."),
        (None, "Got None (NoneType). Leave such samples out with ms.views.select, or fill in text."),
        (3, "Got 3 (int)."),
        ({"text": "mill"}, "Pass the field that has the text: lambda sample: {'tokens': tokenizer(sample['text'])}."),
    ],
    ids=["bytes", "None", "int", "dict"],
)
def test_what_is_not_text_is_refused_by_name(value, fix):
    for tokenizer in (byte_tokenizer(), made("tokenizers")[0]):
        with refuses(TypeError, "Tokenizer needs text to be a str.", fix):
            tokenizer(value)
        with refuses(TypeError, "Tokenizer.encode_batch: texts[1] needs text to be a str.", fix):
            tokenizer.encode_batch(["", value])
    with refuses(TypeError, "Tokenizer.encode_batch needs texts to be a list of str. Got 'mill' (str)."):
        byte_tokenizer().encode_batch("mill")


def test_an_end_token_that_is_not_there_is_refused_with_those_that_are():
    with refuses(ValueError, "no token of the name eos='<eox>'. Did you mean '<eos>'? Its special tokens: '<bos>', '"):
        Tokenizer(hugging_face(), eos="<eox>")
    with refuses(ValueError, "eos='</x>'", "Its special tokens: '<s>', '</s>'; or pass an id."):
        Tokenizer(pieces(), eos="</x>")
    with refuses(ValueError, "eos='end'", "Its special tokens: '<|endoftext|>'; or pass an id."):
        Tokenizer(encoding(), eos="end")
    with refuses(ValueError, "eos='end'", "It names no special tokens; or pass an id."):
        Tokenizer(letters, vocabulary_size=9, eos="end")
    with refuses(ValueError, "Tokenizer needs eos to be an int from 0 to 8. Got 9 (int)."):
        Tokenizer(letters, vocabulary_size=9, eos=9)


def test_a_model_that_is_none_is_refused():
    rule = "needs model to be a tokenizer of Hugging Face, tiktoken or SentencePiece, or a function from text to ids."
    with refuses(TypeError, rule, "Load it first: tokenizers.Tokenizer.from_pretrained('gpt2')."):
        Tokenizer("gpt2")
    with refuses(TypeError, rule, "Got <class 'int'> (type). Load one first."):
        Tokenizer(int)

    class Own:
        def encode(self, text):
            return [1]

    with refuses(TypeError, rule, "Pass its function: tokenizer.encode."):
        Tokenizer(Own())
    assert Tokenizer(Own().encode, vocabulary_size=2)("x").tolist() == [1]


def test_ids_that_are_drawn_at_random_are_refused():
    model = hugging_face()
    model.model.dropout = 0.5
    with refuses(ValueError, "needs the same ids for the same text every time", "Set tokenizer.model.dropout = None."):
        Tokenizer(model)
    with refuses(ValueError, "this SentencePieceProcessor draws them at random", "Load it without enable_sampling."):
        Tokenizer(pieces(enable_sampling=True))


def test_a_function_needs_a_size_and_keeps_below_it():
    with refuses(ValueError, "Tokenizer needs vocabulary_size for a function", "one more than the highest id"):
        Tokenizer(letters)
    with refuses(ValueError, "needs ids from 0 to 99, below its vocabulary_size. letters gave 29100 to 29100."):
        Tokenizer(letters, vocabulary_size=100)("a")
    with refuses(ValueError, "gave -1 to 1"):
        Tokenizer(lambda text: [1, -1], vocabulary_size=100)("a")
    for wrong in ([1.5], [[1], [2]], [[1], [2, 3]], "ids", None):
        with refuses(TypeError, "Tokenizer needs ids as whole numbers along one axis. <lambda> gave"):
            Tokenizer(lambda text, wrong=wrong: wrong, vocabulary_size=100)("a")
    with refuses(ValueError, "Tokenizer needs vocabulary_size to be an int from 320 to 4,294,967,296. Got 300 (int)."):
        Tokenizer(hugging_face(), vocabulary_size=300)
    changed = hugging_face()
    tokenizer = Tokenizer(changed)
    changed.add_tokens(["millwheel"])
    with refuses(ValueError, "needs ids from 0 to 319", "Hugging Face gave 0 to 320."):
        tokenizer("millwheel")


def test_what_cannot_be_decoded_is_refused():
    with refuses(TypeError, "Tokenizer.decode needs a function from ids to text beside letters. Pass decode=."):
        Tokenizer(letters, vocabulary_size=9).decode([1])
    there = Tokenizer(letters, vocabulary_size=9, decode=lambda ids: "".join(map(str, ids)))
    assert there.decode(np.array([1, 2])) == "12"
    with refuses(TypeError, "Tokenizer takes decode= for a function.", "has its own."):
        Tokenizer(hugging_face(), decode=str)
    with refuses(TypeError, "Tokenizer.decode needs ids to be whole numbers along one axis", "shape (2, 3), int64"):
        there.decode(np.zeros((2, 3), int))
    with refuses(TypeError, "Tokenizer.decode needs ids to be whole numbers along one axis", "float64"):
        there.decode([1.5])
    with refuses(ValueError, "Tokenizer.decode needs ids from 0 to 8. Got -100 to 3. Leave padding out first."):
        there.decode([3, -100])
    assert byte_tokenizer().decode([0xC3]) == "\ufffd"


def test_a_tokenizer_is_a_stage_of_a_pipeline(key):
    tokenizer, words = byte_tokenizer(), ["mill", "corn", "oats"]
    source = ms.DatasetSource(words, ordering="sequential")
    for stages in ([source, ms.HostMapTransform(tokenizer)], [source.map(tokenizer)]):
        loader = ms.DataLoader([*stages, ms.BatchTransform(3)])
        batch, _ = next(loader.iterate(loader.init_state(key)))
        assert [tokenizer.decode(row) for row in batch] == words
