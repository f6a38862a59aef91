"""Reward models: tiny random classifiers, compared with a direct transformers call on one unpadded sequence at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from grpo_cli.errors import ModelError
from grpo_cli.scoring.reward_model import RewardModel, load_reward_model

PROMPTS = ["What is up?", "Say a longer thing, please.", "Hm", "And now?"]
COMPLETIONS = ["Not much.", "a b", "x" * 40, "I end.<|im_end|>"]


def chat(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


CHAT_PROMPTS = [[chat("user", prompt)] for prompt in PROMPTS]
CHAT_COMPLETIONS = [[chat("assistant", completion)] for completion in COMPLETIONS]


def save(folder: Path, config: Any, tokenizer: PreTrainedTokenizerFast) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, *, num_labels: int = 1) -> Path:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        num_labels=num_labels,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save(folder, config, tokenizer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama", build_tiny_tokenizer())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = {
        token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "up", "x", "?"])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=64
    )
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=1,
    )
    return save(tmp_path_factory.mktemp("models") / "bert", config, tokenizer)


def load(folder: Path, **options: Any) -> RewardModel:
    return load_reward_model(str(folder), folder=Path(), device="cpu", **options)


@torch.no_grad()
def direct(folder: Path, texts: list[str], **options: Any) -> list[float]:
    """Score each text alone: no padding, no batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [model(**tokenizer(text, return_tensors="pt", **options)).logits.item() for text in texts]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_plain_text_scores_as_prompt_and_completion_joined(llama: Path, batch_size: int) -> None:
    expected = direct(llama, [a + b for a, b in zip(PROMPTS, COMPLETIONS, strict=True)])
    scores = load(llama, batch_size=batch_size)(prompts=PROMPTS, completions=COMPLETIONS)
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score in scores}) == len(scores)


def test_an_encoder_gets_its_special_tokens(bert: Path) -> None:
    texts = ["what is up ? x", "x", "what what what is is"]
    expected = direct(bert, texts)
    assert load(bert)(prompts=[""] * 3, completions=texts) == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(direct(bert, texts, add_special_tokens=False), abs=1e-2)


def test_a_conversation_goes_through_the_chat_template(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    texts = [
        tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        for prompt, completion in zip(CHAT_PROMPTS, CHAT_COMPLETIONS, strict=True)
    ]
    scores = load(llama)(prompts=CHAT_PROMPTS, completions=CHAT_COMPLETIONS)
    assert scores == pytest.approx(direct(llama, texts, add_special_tokens=False), abs=1e-4)


def test_a_chat_template_brings_its_own_special_tokens(bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokenizer.chat_template = "[CLS]{% for message in messages %}{{ message['content'] }}[SEP]{% endfor %}"
    AutoModelForSequenceClassification.from_pretrained(bert).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scores = load(tmp_path)(prompts=[[chat("user", "what is up")]], completions=[[chat("assistant", "x")]])
    assert scores == pytest.approx(direct(bert, ["[CLS]what is up[SEP]x[SEP]"], add_special_tokens=False), abs=1e-4)


def test_a_continued_assistant_turn_is_one_message(llama: Path) -> None:
    model = load(llama)
    question = chat("user", "Why?")
    begun = model(prompts=[[question, chat("assistant", "Because ")]], completions=[[chat("assistant", "of it.")]])
    whole = model(prompts=[[question]], completions=[[chat("assistant", "Because of it.")]])
    assert begun == whole


def test_long_inputs_are_cut_at_max_length_or_the_tokenizers_own_limit(llama: Path) -> None:
    cut = load(llama, max_length=10)(prompts=["x" * 8], completions=["abcdef"])
    assert cut == pytest.approx(direct(llama, ["x" * 8 + "ab"]), abs=1e-4)
    own = load(llama)(prompts=["x" * 500], completions=["y" * 50])
    assert own == pytest.approx(direct(llama, ["x" * 500 + "y" * 12]), abs=1e-4)


def test_without_a_padding_token_the_end_token_is_not_taken_for_one(tmp_path: Path) -> None:
    """Padding with the end token would move the score of a completion that ends in it to the token before."""
    tokenizer = build_tiny_tokenizer()
    tokenizer.pad_token = None
    folder = save_llama(tmp_path / "no-pad", tokenizer)
    texts = [a + b for a, b in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert load(folder)(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(direct(folder, texts), abs=1e-4)


def test_a_relative_path_starts_from_the_recipes_folder(llama: Path) -> None:
    model = load_reward_model(llama.name, folder=llama.parent, device="cpu")
    assert len(model(prompts=["a"], completions=["b"])) == 1


def test_a_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "two", build_tiny_tokenizer(), num_labels=2)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value) == (
        f"reward model {folder}: it has 2 labels; allowed is 1\n"
        "  hint: a reward model is a sequence-classification model with one output, not a language model"
    )


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path / "nothing")
    assert caught.value.message.startswith(f"reward model {tmp_path / 'nothing'}: cannot load it: ")
    assert "\n" not in caught.value.message


def test_a_reward_model_reads_the_texts_of_prompts_with_images(llama: Path) -> None:
    model = load_reward_model(str(llama), folder=Path(), device="cpu")
    parts = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}] for text in PROMPTS]
    assert model(prompts=parts, completions=CHAT_COMPLETIONS) == model(
        prompts=CHAT_PROMPTS, completions=CHAT_COMPLETIONS
    )
