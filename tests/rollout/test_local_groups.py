"""The fast way to sample: prompts held once for their groups, rows that join and leave while others are being sampled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, build_tiny_model
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, GptOssConfig

from grpo_cli.rollout.local import LocalEngine
from grpo_cli.rollout.local.decoder import CacheDecoder, evaluating
from grpo_cli.rollout.local.group_cache import NAME
from grpo_cli.rollout.local.group_decoder import GroupDecoder, attending_by_groups
from grpo_cli.types import Completion, Group, Prompt, Sampling

Settings = Callable[..., Sampling]

SLOW = {"gemma2": "softcap", "gemma3": "see 8 tokens", "mistral": "see 8 tokens"}
FAST = tuple(family for family in FAMILIES if family not in SLOW)
ENDS = tuple(range(24))
"""Stop tokens that end completions of the tiny models after a few tokens, sooner or later."""


def ids_of(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


def all_of(groups: list[Group]) -> list[tuple[Prompt, Completion]]:
    return [(group.prompt, completion) for group in groups for completion in group.completions]


def plain_logps(model: Any, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Log-probabilities from one forward over prompt and completion."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.ids + completion.ids])).logits[0].float()
    targets = torch.tensor(completion.ids)[:, None]
    logps: torch.Tensor = logits[len(prompt.ids) - 1 : -1].log_softmax(dim=-1).gather(1, targets)[:, 0]
    return logps


def logits_of(decoder: CacheDecoder | GroupDecoder, numbers: list[int], tokens: list[list[int]]) -> torch.Tensor:
    """Logits of rows that take these tokens, step by step."""
    return torch.stack([decoder.join(numbers), *(decoder.step(step) for step in tokens)])


def test_it_is_taken_for_these_families(
    family_models: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    for family, model in family_models.items():
        engine = LocalEngine(model, tokenizer, max_num_seqs=4)
        engine.generate(prompts, settings(), num_generations=1, seed_key=(0,))
        if family in SLOW:
            (notice,) = engine.notices
            assert notice.startswith(f"{type(model).__name__}: completions are sampled with the model's own cache")
            assert SLOW[family] in notice
        else:
            assert engine.notices == []


def test_it_can_be_switched_off(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    implementations = set()

    def observe(_: int) -> None:
        implementations.add(model.config._attn_implementation)

    engine = LocalEngine(model, tokenizer, max_num_seqs=4, share_prefix=False, on_progress=observe)
    engine.generate(prompts, settings(), num_generations=1, seed_key=(0,))
    assert implementations == {"sdpa"}
    assert engine.notices == []


@pytest.mark.parametrize("family", FAST)
def test_logits_are_those_of_the_models_own_cache(family: str, family_models: Any, prompts: list[Prompt]) -> None:
    model = family_models[family]
    ids = [prompt.ids for prompt in prompts]
    numbers = [1, 1, 1, 0, 0, 2, 3]
    tokens = torch.randint(256, (6, len(numbers)), generator=torch.Generator().manual_seed(0)).tolist()
    with evaluating(model):
        expected = logits_of(CacheDecoder(model, ids), numbers, tokens)
        with attending_by_groups(model):
            found = logits_of(GroupDecoder(model, ids, slots=7, max_tokens=9), numbers, tokens)
    # Roundings of float32 come to 1e-6 to 3e-6 of the largest logit, by processor.
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("family", FAST)
def test_logps_are_those_of_a_plain_forward_to_rounding(
    family: str, tmp_path: Path, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    # Weights of a spread that is still large but gives logits in the range of real models'.
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, family, initializer_range=0.2))
    engine = LocalEngine(model, tokenizer, max_num_seqs=5)
    groups = engine.generate(prompts, settings(max_tokens=20, stop_ids=ENDS), num_generations=4, seed_key=(0,))
    assert engine.notices == []
    model.eval()
    for prompt, completion in all_of(groups):
        torch.testing.assert_close(completion.logps, plain_logps(model, prompt, completion), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "qwen3_moe"])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_neither_tokens_nor_logps_depend_on_slots_order_or_neighbours(
    family: str,
    repetition_penalty: float,
    family_models: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    settings: Settings,
) -> None:
    sampling = settings(max_tokens=24, stop_ids=ENDS, repetition_penalty=repetition_penalty)

    def sample(chosen: list[Prompt], max_num_seqs: int) -> dict[tuple[str, int], Completion]:
        engine = LocalEngine(family_models[family], tokenizer, max_num_seqs=max_num_seqs)
        groups = engine.generate(chosen, sampling, num_generations=6, seed_key=(3,))
        return {(prompt.uid, completion.index): completion for prompt, completion in all_of(groups)}

    together = sample(prompts, 64)
    assert len({len(completion.ids) for completion in together.values()}) >= 8
    for other in (
        *(sample(prompts, slots) for slots in (1, 2, 7, 11)),
        sample(prompts[::-1], 8),
        sample(prompts[2:3], 4),
    ):
        for key, completion in other.items():
            assert completion.ids == together[key].ids
            torch.testing.assert_close(completion.logps, together[key].logps, atol=5e-5, rtol=0)


def test_rows_that_wait_join_as_soon_as_there_is_room(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    """The steps are those of a list schedule: each row in turn goes to the slot that is free first."""
    slots = 6
    widths: list[int] = []
    rows: list[int] = []
    engine = LocalEngine(model, tokenizer, max_num_seqs=slots)

    def see(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        rows.append(inputs["input_ids"].shape[0])
        widths.append(inputs["input_ids"].shape[1])

    model.register_forward_pre_hook(see, with_kwargs=True)
    chosen = sorted(prompts, key=lambda prompt: len(prompt.ids), reverse=True)[:4]
    groups = engine.generate(chosen, settings(max_tokens=40, stop_ids=ENDS), num_generations=8, seed_key=(0,))
    lengths = [len(completion.ids) for _, completion in all_of(groups)]
    free = [0] * slots
    for length in lengths:
        free[free.index(min(free))] += length
    # Every prompt has several tokens. A row's first token comes with its prompt, the others with one step each.
    assert widths.count(1) == max(free) - 1
    assert max(rows) == slots
    waves = sum(max(lengths[start : start + slots]) - 1 for start in range(0, len(lengths), slots))
    assert widths.count(1) < 0.75 * waves


def test_prompts_that_begin_together_are_fed_in_one_row_without_padding(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    shapes = []
    model.register_forward_pre_hook(
        lambda _module, _args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    engine.generate(prompts, settings(), num_generations=4, seed_key=(0,))
    assert shapes[0] == (1, sum(len(prompt.ids) for prompt in prompts))
    assert all(width == 1 for _, width in shapes[1:])


def test_many_prompt_tokens_are_fed_in_parts(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(
        LocalEngine(model, tokenizer, max_num_seqs=64).generate(prompts, settings(), num_generations=4, seed_key=(0,))
    )
    monkeypatch.setattr("grpo_cli.rollout.local.rows._PROMPT_TOKENS_AT_ONCE", 30)
    engine = LocalEngine(model, tokenizer, max_num_seqs=64)
    widths = []
    model.register_forward_pre_hook(
        lambda _module, _args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    assert ids_of(engine.generate(prompts, settings(), num_generations=4, seed_key=(0,))) == expected
    fed = [width for width in widths if width > 1]
    assert len(fed) >= 2
    assert max(fed) <= 30
    assert sum(fed) == sum(len(prompt.ids) for prompt in prompts)


def test_a_prompt_is_held_once_for_its_group_and_let_go_afterwards(model: Any, prompts: list[Prompt]) -> None:
    ids = [prompt.ids for prompt in prompts]
    with evaluating(model), attending_by_groups(model):
        decoder = GroupDecoder(model, ids, slots=8, max_tokens=4)
        decoder.join([1] * 6 + [2] * 2)
        layers = list(decoder.cache._layers.values())
        assert len(layers) == model.config.num_hidden_layers
        for layer in layers:
            assert {number: tuple(key.shape) for number, (key, _) in layer.prompts.items()} == {
                1: (2, len(ids[1]), 8),
                2: (2, len(ids[2]), 8),
            }
            for states in (states for pair in layer.prompts.values() for states in pair):
                assert states.untyped_storage().nbytes() == states.nbytes  # no part of something larger
        decoder.step([0] * 8)
        decoder.keep([6, 7])
        decoder.join([3] * 2)
        assert all(layer.prompts.keys() == {2, 3} for layer in layers)


def test_what_rows_sample_is_written_in_place(model: Any, prompts: list[Prompt]) -> None:
    with evaluating(model), attending_by_groups(model):
        decoder = GroupDecoder(model, [prompt.ids for prompt in prompts], slots=5, max_tokens=300)
        decoder.join([0, 0, 1])
        places = []
        for _ in range(300):
            decoder.step([0] * len(decoder.cache.numbers))
            if len(decoder.cache.numbers) == 3:
                decoder.keep([0, 2])
                decoder.join([2, 2])
                decoder.keep([0, 1, 3])
            layer = decoder.cache._layers[0]
            places.append((layer.key.data_ptr(), layer.value.data_ptr(), layer.key.shape[2]))
    # Rows come and go in the same buffers; these double where a row needs more room, up to the longest row.
    assert [room for _, _, room in places] == [128] * 128 + [256] * 128 + [300] * 44
    assert len(set(places)) == 3


def test_buffers_that_grow_keep_what_they_hold(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = settings(max_tokens=40, stop_ids=ENDS)
    engine = LocalEngine(model, tokenizer, max_num_seqs=5)
    expected = ids_of(engine.generate(prompts, sampling, num_generations=4, seed_key=(0,)))
    assert max(len(ids) for group in expected for ids in group) > 16
    monkeypatch.setattr("grpo_cli.rollout.local.group_layer._FIRST_CAPACITY", 2)
    assert ids_of(engine.generate(prompts, sampling, num_generations=4, seed_key=(0,))) == expected


def test_memory_that_is_not_written_yet_does_not_matter(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a former row left in a slot is finite but wrong: here it is everywhere."""
    sampling = settings(max_tokens=24, stop_ids=ENDS)
    expected = ids_of(
        LocalEngine(model, tokenizer, max_num_seqs=5).generate(prompts, sampling, num_generations=4, seed_key=(0,))
    )
    new_zeros = torch.Tensor.new_zeros
    monkeypatch.setattr(
        torch.Tensor,
        "new_zeros",
        lambda *sizes: new_zeros(*sizes).fill_(50.0) if len(sizes) == 5 else new_zeros(*sizes),
    )
    engine = LocalEngine(model, tokenizer, max_num_seqs=5)
    assert engine.notices == []
    assert ids_of(engine.generate(prompts, sampling, num_generations=4, seed_key=(0,))) == expected


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_models_own_attention_comes_back(
    implementation: str,
    fails: bool,
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    settings: Settings,
) -> None:
    def observe(_: int) -> None:
        assert model.config._attn_implementation == NAME
        assert not model.training
        if fails:
            raise RuntimeError("interrupted")

    model.set_attn_implementation(implementation)
    model.train()
    engine = LocalEngine(model, tokenizer, max_num_seqs=4, on_progress=observe)
    assert model.config._attn_implementation == implementation
    assert model.training
    if fails:
        with pytest.raises(RuntimeError, match="interrupted"):
            engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    else:
        engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    assert model.config._attn_implementation == implementation
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_windows_that_hold_prompt_and_completion_do_not_matter(
    tmp_path: Path, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    window = max(len(prompt.ids) for prompt in prompts) + 10
    for family in ("mistral", "gemma3"):
        folder = build_tiny_model(tmp_path / family, family, sliding_window=window, initializer_range=0.2)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        engine = LocalEngine(model, tokenizer, max_num_seqs=4)
        for max_tokens, notices in ((10, 0), (11, 1), (12, 1)):
            groups = engine.generate(prompts, settings(max_tokens=max_tokens), num_generations=2, seed_key=(0,))
            assert len(engine.notices) == notices
            for prompt, completion in all_of(groups):
                torch.testing.assert_close(completion.logps, plain_logps(model, prompt, completion), atol=1e-5, rtol=0)


def test_adapters_are_sampled_with(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = get_peft_model(model, config)
    engine = LocalEngine(adapted, tokenizer, max_num_seqs=6)
    assert engine.notices == []
    groups = engine.generate(prompts, settings(max_tokens=20, stop_ids=ENDS), num_generations=3, seed_key=(0,))
    adapted.eval()
    differences = []
    for prompt, completion in all_of(groups):
        torch.testing.assert_close(completion.logps, plain_logps(adapted, prompt, completion), atol=1e-4, rtol=0)
        with adapted.disable_adapter():
            differences.append((completion.logps - plain_logps(adapted, prompt, completion)).abs().max())
    assert max(differences) > 1e-2


def test_autocast_samples_in_its_type(model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings) -> None:
    engine = LocalEngine(model, tokenizer, max_num_seqs=6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        groups = engine.generate(prompts, settings(stop_ids=ENDS), num_generations=3, seed_key=(0,))
        differences = torch.cat(
            [completion.logps - plain_logps(model, prompt, completion) for prompt, completion in all_of(groups)]
        ).abs()
    exact = torch.cat(
        [completion.logps - plain_logps(model, prompt, completion) for prompt, completion in all_of(groups)]
    ).abs()
    assert engine.notices == []
    assert differences.mean() < 0.05
    assert exact.mean() > 1e-3  # it was not float32


SHAPE = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 257, "pad_token_id": None, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=99, **SHAPE), None),  # positions begin with each prompt
        (BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SHAPE), "cannot be exchanged"),
        (
            GptOssConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, **HEADS, **EXPERTS, **SHAPE),
            "sinks",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_other_attention_than_it_knows_keeps_the_models_own_cache(
    config: Any, reason: str | None, tokenizer: Any, prompts: list[Prompt], settings: Settings
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    assert engine.notices == [] if reason is None else reason in engine.notices[0]
    groups = engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))
    for prompt, completion in all_of(groups):
        torch.testing.assert_close(completion.logps, plain_logps(model, prompt, completion), atol=2e-5, rtol=0)


def test_a_model_whose_logits_would_differ_is_sampled_with_its_own_cache(
    model: Any, tokenizer: Any, prompts: list[Prompt], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the keys of one layer are spoilt whenever the model attends by groups."""
    expected = ids_of(
        LocalEngine(model, tokenizer, max_num_seqs=4).generate(prompts, settings(), num_generations=2, seed_key=(0,))
    )
    model.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda _module, _args, output: output * 1.1 if model.config._attn_implementation == NAME else output
    )
    engine = LocalEngine(model, tokenizer, max_num_seqs=4)
    (notice,) = engine.notices
    assert "its logits would differ by" in notice
    assert ids_of(engine.generate(prompts, settings(), num_generations=2, seed_key=(0,))) == expected
